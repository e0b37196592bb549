"""Samples a checkpoint, so that ranks find out before they load whether their copies differ.

Ranks read different parts of most tensors, so digests of what they read cannot show that two copies
differ. The sample covers the same bytes on every rank: each tensor's entry in the header, and 4 KiB
from the middle of its data. Two differently trained models differ there. A copy with a few changed
bytes may not; that is what checksums of the download are for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import blake3

from tpdet.checkpoint.gguf.header import TensorEntry, is_gguf, read_header
from tpdet.checkpoint.safetensors_header import SafetensorsEntry, read_safetensors_header

SAMPLE_BYTES = 4096


def sample_checkpoint(directory: Path, files: Sequence[str]) -> dict[str, str]:
    """A digest (hex) of each tensor's entry and sample, under the key "checkpoint tensor NAME".

    files: the names of the files that `open_checkpoint` opened. Each tensor costs one small read.
    """
    if is_gguf(directory):
        return _sample_gguf(directory)
    found: dict[str, str] = {}
    for name_of_file in files:
        entries = read_safetensors_header(directory / name_of_file)
        with (directory / name_of_file).open("rb") as file:
            for name, entry in sorted(entries.items()):
                found |= _sample(file, name, entry, entry.dtype)
    return found


def _sample_gguf(path: Path) -> dict[str, str]:
    """The same of a GGUF file."""
    found: dict[str, str] = {}
    with path.open("rb") as file:
        for name, entry in sorted(read_header(path).tensors.items()):
            found |= _sample(file, name, entry, entry.kind)
    return found


def _sample(
    file: BinaryIO, name: str, entry: SafetensorsEntry | TensorEntry, kind: str
) -> dict[str, str]:
    """The digest of one tensor; a small one is sampled whole."""
    file.seek(entry.offset + max(0, (entry.size - SAMPLE_BYTES) // 2))
    sample = file.read(min(SAMPLE_BYTES, entry.size))
    about = f"{kind} {list(entry.shape)}\n".encode()
    return {f"checkpoint tensor {name}": blake3.blake3(about + sample).hexdigest()[:32]}
