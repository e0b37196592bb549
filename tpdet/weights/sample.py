"""A glance at a checkpoint, by which ranks find out before they load that theirs are not the same.

Ranks read different parts of most tensors, so the digests of what they read cannot show that two
copies differ in those. The glance is at the same places on every rank: each tensor's entry in the
header, and 4 KiB from the middle of its bytes. Two models trained apart differ there; a copy with a
few bytes changed may not, which the sender's checksums are for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import blake3

from tpdet.model_config.json_file import parse_json_object

SAMPLE_BYTES = 4096


def sample_checkpoint(directory: Path, files: Sequence[str]) -> dict[str, str]:
    """A digest (hex) of each tensor's entry and sample, by "checkpoint tensor NAME".

    files: names of those that `open_checkpoint` has taken. One small read a tensor.
    """
    found = {}
    for name_of_file in files:
        with (directory / name_of_file).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json_object(file.read(length).decode("utf-8"), name_of_file)
            for name, entry in sorted(header.items()):
                if name != "__metadata__":
                    file.seek(8 + length + _middle(entry))
                    sample = file.read(min(SAMPLE_BYTES, _size(entry)))
                    about = f"{entry['dtype']} {entry['shape']}\n".encode()
                    digest = blake3.blake3(about + sample).hexdigest()[:32]
                    found[f"checkpoint tensor {name}"] = digest
    return found


def _size(entry: dict[str, Any]) -> int:
    first, end = entry["data_offsets"]
    return int(end - first)


def _middle(entry: dict[str, Any]) -> int:
    """Where the sample begins, from the end of the header; whole for a small tensor."""
    return int(entry["data_offsets"][0]) + max(0, (_size(entry) - SAMPLE_BYTES) // 2)
