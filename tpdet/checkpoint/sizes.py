"""Checks that a checkpoint has the sizes of its configuration, by the headers of its files.

This runs before anything of those sizes is allocated: otherwise a wrong number in `config.json`
would fill the memory before the weights are read and refused.
"""

from collections.abc import Mapping
from pathlib import Path

from tpdet.checkpoint.checkpoint import open_checkpoint


def check_sizes(directory: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check the shapes of the tensors named in `expected`.

    Raises CheckpointError naming the file, the tensor and both shapes, or a missing tensor; and as
    `open_checkpoint`.
    """
    checkpoint = open_checkpoint(directory)
    for name, shape in expected.items():
        checkpoint.check_shape(name, shape)
