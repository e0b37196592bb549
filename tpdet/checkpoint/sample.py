"""Samples a checkpoint, so that ranks find out before they load whether their copies differ.

Ranks read different parts of most tensors, so digests of what they read cannot show that two copies
differ. The sample covers the same bytes on every rank: each tensor's entry in the header, and 4 KiB
from the middle of its data. Two differently trained models differ there. A copy with a few changed
bytes may not; that is what checksums of the download are for.
"""

from collections.abc import Mapping, Sequence
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
    digests: dict[str, str] = {}
    for path in [directory] if is_gguf(directory) else [directory / name for name in files]:
        entries: Mapping[str, SafetensorsEntry | TensorEntry] = (
            read_header(path).tensors if is_gguf(path) else read_safetensors_header(path)
        )
        with path.open("rb") as file:
            for name, entry in sorted(entries.items()):
                digests[f"checkpoint tensor {name}"] = _sample(file, entry)
    return digests


def _sample(file: BinaryIO, entry: SafetensorsEntry | TensorEntry) -> str:
    """The digest of one tensor; a small one is sampled whole."""
    file.seek(entry.offset + max(0, (entry.size - SAMPLE_BYTES) // 2))
    sample = file.read(min(SAMPLE_BYTES, entry.size))
    kind = entry.kind if isinstance(entry, TensorEntry) else entry.dtype
    about = f"{kind} {list(entry.shape)}\n".encode()
    return blake3.blake3(about + sample).hexdigest()[:32]
