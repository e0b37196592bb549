"""What a linear-attention layer keeps of its sequences, and the numbers of its gates.

A slot is a sequence's place in every tensor. Chunks are 64 absolute positions; a ring holds the
newest positions, each at its number mod the ring's length. Hv value heads, Hk key heads of this
rank, of sizes Dv and Dk; C channels: those of all queries, keys and values side by side.
"""

from typing import NamedTuple

import torch

from tpdet.kernels.order import CONVOLUTION_TAPS


class LinearState(NamedTuple):
    """The state of one gated delta-net layer (Yang et al. 2024, arXiv 2412.06464), all slots.

    boundary: fp32 [N + S, Hv, Dk, Dv], the state at the start of a chunk, which a row's `standing`
    names; the last S are snapshots. keys [N, R, Hk, Dk], raw, in the model's dtype; updates fp32
    [N, R, Hv, Dv], right-hand sides with the keys' norms in them; inverses fp32 [N, R, Hv, 16], by
    which those of a block of 16 rows are solved; decays int64 [N, R, Hv]: rings of two chunks or
    more. inputs [N, R', C]: rows before the short convolution, whose ring holds a run of drafts and
    three rows more. tails [S, 3, C]: the rows before each snapshot's position, of the same kind.
    """

    boundary: torch.Tensor
    keys: torch.Tensor
    updates: torch.Tensor
    inverses: torch.Tensor
    decays: torch.Tensor
    inputs: torch.Tensor
    tails: torch.Tensor


class DeltaGates(NamedTuple):
    """What decays are made by: a_log and dt_bias, fp32 [Hv] as a checkpoint stores them."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor


class StateMove(NamedTuple):
    """boundary[target] becomes boundary[source], moved on by source's stored rows of `chunk`."""

    source: int
    target: int
    chunk: int


TAPS = CONVOLUTION_TAPS
BLOCK_ROWS = 16
"""Rows of a chunk that are solved together; those of earlier blocks enter by products."""
TWO_TERMS = (torch.bfloat16,)
"""The model dtypes of which fp32 operands of products have two terms; else they are fp32."""
LENGTH_EPS = 1e-6
"""Added to a key's or query's sum of squares, as every model of the family has it."""


def terms_of(dtype: torch.dtype) -> int:
    """Terms of an fp32 operand beside rows of a model's dtype."""
    return 2 if dtype in TWO_TERMS else 1
