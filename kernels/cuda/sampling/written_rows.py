"""Samples rows by numbers that stay on the GPU, so that a CUDA graph can sample and move on.

numbers  int64 [R * ROW_FIELDS]  the rows' table (`row_table`), then
         int64 [R]               the filtered rows, the first of them again in the places left
"""

from functools import lru_cache

import numpy as np
import torch

from tpdet.kernels.cuda.sampling.row_table import POSITION, ROW_FIELDS, row_table
from tpdet.kernels.cuda.sampling.sample_rows import sample_by_table
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.sampled_rows import SampledRows
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.kernels.inputs.written_rows import WORDS


@lru_cache
def _pad(vocabulary: int) -> np.ndarray:
    """The fields of a pad, which is greedy."""
    return row_table(PlainRows.of([RowParams(0.0, 0, 0)]), [], vocabulary)[0]


def write_rows(rows: PlainRows, vocabulary: int, numbers: np.ndarray) -> bool:
    """Write rows to int64 [R * WORDS], R >= len(rows) > 0; the others are pads.

    Returns whether any row has top-k or top-p.
    """
    room = len(numbers) // WORDS
    end = room * ROW_FIELDS.value
    table, slots = numbers[:end].reshape(room, -1), numbers[end:]
    found, filtered, _ = row_table(rows, [], vocabulary)
    table[: len(rows)] = found.reshape(len(rows), -1)
    table[len(rows) :] = _pad(vocabulary)
    slots[:] = filtered[0] if len(filtered) else 0
    slots[: len(filtered)] = filtered
    return len(filtered) > 0


def sample_written(
    logits: torch.Tensor, numbers: torch.Tensor, filtered: bool, shard: Shard
) -> SampledRows:
    """One token a row: fp32 [R, W] and what `write_rows` wrote, and said of filters."""
    table = numbers[: len(logits) * ROW_FIELDS.value]
    return sample_by_table(logits, table, numbers[len(table) :] if filtered else None, shard)


def move_on(numbers: torch.Tensor, by: torch.Tensor) -> None:
    """Add int64 [R] to the positions of written rows."""
    table = numbers[: len(by) * ROW_FIELDS.value].view(len(by), ROW_FIELDS.value)
    table[:, POSITION.value].add_(by)
