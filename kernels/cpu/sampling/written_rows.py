"""Samples rows by numbers that are moved on from step to step, as a GPU's graphs do.

numbers  int64 [R, WORDS]  a row of `PlainRows.numbers`, its position, then nothing
"""

import numpy as np
import torch

from tpdet.kernels.cpu.sampling.sample_rows import sample_rows
from tpdet.kernels.inputs.plain_rows import FIELDS, PlainRows
from tpdet.kernels.inputs.sampled_rows import SampledRows
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.kernels.inputs.written_rows import WORDS


def write_rows(rows: PlainRows, vocabulary: int, numbers: np.ndarray) -> bool:
    """Write rows to int64 [R * WORDS], R >= len(rows) > 0; the others are pads: zeros, greedy.

    Returns whether any row has top-k or top-p.
    """
    numbers[:] = 0
    table = numbers.reshape(-1, WORDS)[: len(rows)]
    table[:, :FIELDS], table[:, FIELDS] = rows.numbers, rows.positions
    return any(way.filtered for way in rows.ways()[0])


def sample_written(
    logits: torch.Tensor, numbers: torch.Tensor, filtered: bool, shard: Shard
) -> SampledRows:
    """One token a row: fp32 [R, W] and what `write_rows` wrote."""
    table = numbers.numpy().reshape(-1, WORDS)
    return sample_rows(logits, PlainRows(table[:, :FIELDS].tobytes(), table[:, FIELDS]), shard)


def move_on(numbers: torch.Tensor, by: torch.Tensor) -> None:
    """Add int64 [R] to the positions of written rows."""
    numbers.view(-1, WORDS)[:, FIELDS].add_(by)
