"""Real models and tokenizers from published wheels, fetched once below models/; None offline."""

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.lib.tree import ROOT

DASHSCOPE = (
    "dashscope==2.0.2 --hash=sha256:"
    "0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258"
)
QWEN = "dashscope/resources/qwen.tiktoken"
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
    kept = ROOT / "models" / "wheels" / "qwen.tiktoken"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        wanted = kept.with_name("dashscope.txt")
        wanted.write_text(DASHSCOPE + "\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1"]
        command += [
            "--require-hashes",
            "--only-binary=:all:",
            f"--dest={kept.parent}",
            "-r",
            wanted,
        ]
        if subprocess.run(command, capture_output=True, timeout=200).returncode:
            return None
        (wheel,) = kept.parent.glob("dashscope-*.whl")
        temporary = kept.with_suffix(f".{id(command)}")
        temporary.write_bytes(zipfile.ZipFile(wheel).read(QWEN))
        temporary.rename(kept)
    return kept.read_bytes()
