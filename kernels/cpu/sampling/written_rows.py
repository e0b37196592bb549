"""Samples rows by numbers that are moved on from step to step, as a GPU's graphs do.

numbers  int64 [WORDS, R]: seed, position, choice, top_k; then the bits of temperature, top_p
         and min_p as fp64
"""

import numpy as np
import torch

from tpdet.kernels.cpu.sampling.sample_rows import sample_rows
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.sampled_rows import SampledRows
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.kernels.inputs.written_rows import WORDS

_POSITION = 1
_PAD = RowParams(temperature=0.0, seed=0, position=0)


def write_rows(rows: PlainRows, vocabulary: int, numbers: np.ndarray) -> bool:
    """Write rows to int64 [R * WORDS], R >= len(rows) > 0; the others are pads.

    Returns whether any row has top-k or top-p.
    """
    columns = numbers.reshape(WORDS, -1)
    padded = [*rows, *[_PAD] * (columns.shape[1] - len(rows))]
    columns[0] = np.array([how.seed for how in padded], np.uint64).view(np.int64)
    columns[1:4] = np.array([(how.position, how.choice, how.top_k) for how in padded]).T
    floats = [(how.temperature, how.top_p, how.min_p) for how in padded]
    columns[4:7] = np.array(floats).T.copy().view(np.int64)
    return any(how.temperature and (how.top_k > 0 or how.top_p < 1.0) for how in rows)


def sample_written(
    logits: torch.Tensor, numbers: torch.Tensor, filtered: bool, shard: Shard
) -> SampledRows:
    """One token a row: fp32 [R, W] and what `write_rows` wrote."""
    columns = numbers.view(WORDS, -1)
    seeds = columns[0].numpy().view(np.uint64).tolist()
    rows = zip(
        seeds, *columns[1:4].tolist(), *columns[4:7].view(torch.float64).tolist(), strict=True
    )
    params = [
        RowParams(temperature, seed, position, choice, top_k, top_p, min_p)
        for seed, position, choice, top_k, temperature, top_p, min_p in rows
    ]
    return sample_rows(logits, params, shard)


def move_on(numbers: torch.Tensor, by: torch.Tensor) -> None:
    """Add int64 [R] to the positions of written rows."""
    numbers.view(WORDS, -1)[_POSITION].add_(by)
