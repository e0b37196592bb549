"""What a linear-attention layer keeps of its sequences, and the numbers of its gates.

A slot is a sequence's place in every tensor. Chunks are 64 absolute positions; a ring holds the
newest positions, each at its number mod the ring's length. Hv value heads, Hk key heads of this
rank, of sizes Dv and Dk; C channels: those of all queries, keys and values side by side.
"""

from typing import NamedTuple

import torch


class LinearState(NamedTuple):
    """The state of one gated delta-net layer (Yang et al. 2024, arXiv 2412.06464), all slots.

    boundary: fp32 [N, Hv, Dk, Dv], the state at the start of a chunk, which a row's `standing`
    names. keys [N, R, Hk, Dk], raw, in the model's dtype; updates fp32 [N, R, Hv, Dv], with the
    keys' norms in them; decays int64 [N, R, Hv]: rings of two chunks or more. inputs [.., R', C]:
    rows before the short convolution, whose ring holds a run of drafts and three rows more.
    """

    boundary: torch.Tensor
    keys: torch.Tensor
    updates: torch.Tensor
    decays: torch.Tensor
    inputs: torch.Tensor


class DeltaGates(NamedTuple):
    """What decays are made by: a_log and dt_bias, fp32 [Hv] as a checkpoint stores them."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor


class StateMove(NamedTuple):
    """boundary[target] becomes boundary[source], moved on by source's stored rows of `chunk`."""

    source: int
    target: int
    chunk: int
