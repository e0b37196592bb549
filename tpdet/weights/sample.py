"""Samples a checkpoint, so that ranks find out before they load whether their copies differ.

Ranks read different parts of most tensors, so digests of what they read cannot show that two copies
differ. The sample covers the same bytes on every rank: each tensor's entry in the header, and 4 KiB
from the middle of its data. Two differently trained models differ there. A copy with a few changed
bytes may not; that is what checksums of the download are for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import blake3

from tpdet.gguf_file.header import is_gguf, read_header
from tpdet.model_config.json_file import parse_json_object

SAMPLE_BYTES = 4096
_LENGTH_BYTES = 8  # at the start of a file: the length of its header


def sample_checkpoint(directory: Path, files: Sequence[str]) -> dict[str, str]:
    """A digest (hex) of each tensor's entry and sample, under the key "checkpoint tensor NAME".

    files: the names of the files that `open_checkpoint` opened. Each tensor costs one small read.
    """
    if is_gguf(directory):
        return _sample_gguf(directory)
    found = {}
    for name_of_file in files:
        with (directory / name_of_file).open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = parse_json_object(file.read(length).decode("utf-8"), name_of_file)
            for name, entry in sorted(header.items()):
                if name != "__metadata__":
                    file.seek(_LENGTH_BYTES + length + _middle(entry))
                    sample = file.read(min(SAMPLE_BYTES, _size(entry)))
                    about = f"{entry['dtype']} {entry['shape']}\n".encode()
                    digest = blake3.blake3(about + sample).hexdigest()[:32]
                    found[f"checkpoint tensor {name}"] = digest
    return found


def _size(entry: dict[str, Any]) -> int:
    first, end = entry["data_offsets"]
    return int(end - first)


def _middle(entry: dict[str, Any]) -> int:
    """Where the sample begins after the header; a small tensor is sampled whole."""
    return int(entry["data_offsets"][0]) + max(0, (_size(entry) - SAMPLE_BYTES) // 2)


def _sample_gguf(path: Path) -> dict[str, str]:
    """The same of a GGUF file."""
    found = {}
    with path.open("rb") as file:
        for name, entry in sorted(read_header(path).tensors.items()):
            file.seek(entry.offset + max(0, (entry.size - SAMPLE_BYTES) // 2))
            sample = file.read(min(SAMPLE_BYTES, entry.size))
            about = f"{entry.kind} {list(entry.shape)}\n".encode()
            found[f"checkpoint tensor {name}"] = blake3.blake3(about + sample).hexdigest()[:32]
    return found
