"""Rows of a linear layer as its convolution leaves them, states full of poison, and steps."""

from typing import NamedTuple

import torch

from tpdet.kernels.inputs.linear_state import (
    BLOCK_ROWS,
    TAPS,
    DeltaGates,
    LinearState,
    StateMove,
)
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS

RING = 2 * CHUNK_TOKENS
INPUTS = 3 * CHUNK_TOKENS


class LinearRows(NamedTuple):
    """q, k [M, Hk, Dk], v [M, Hv, Dv], a, b [M, Hv] of one sequence, and its layer's gates."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    gates: DeltaGates

    def at(self, first, last):
        return LinearRows(*(x[first:last] for x in self[:5]), self.gates)

    def heads(self, first, last):
        """The rows of key heads [first, last) and of the value heads that read them."""
        group = self.v.shape[1] // self.k.shape[1]
        own, of_values = slice(first, last), slice(first * group, last * group)
        rows = [self.q[:, own], self.k[:, own], *(x[:, of_values] for x in self[2:5])]
        return LinearRows(*rows, DeltaGates(*(gate[of_values] for gate in self.gates)))


def linear_rows(
    count, key_heads=2, group=2, key_size=32, value_size=48, dtype=torch.float32, seed=0
):
    """Drawn rows; heads forget at once, slowly, or hardly."""
    generator = torch.Generator().manual_seed(seed)
    heads = key_heads * group

    def drawn(*shape):
        return torch.randn(count, *shape, generator=generator)

    silu = torch.nn.functional.silu
    q, k = (silu(drawn(key_heads, key_size)).to(dtype) for _ in "qk")
    v = silu(drawn(heads, value_size)).to(dtype)
    gates = DeltaGates(torch.linspace(0.01, 16, heads).log(), torch.linspace(-7, 1, heads))
    return LinearRows(q, k, v, drawn(heads), drawn(heads), gates)


def poisoned_state(rows, slots=1, snapshots=0):
    """A state of sequences without rows; what nobody may read is NaN or far off."""
    _, key_heads, key_size = rows.k.shape
    heads, value_size = rows.v.shape[1:]
    channels = 2 * key_heads * key_size + heads * value_size
    rings = slots, RING

    def poison(*shape, dtype=torch.float32):
        return torch.full((*rings, *shape), torch.nan, dtype=dtype)

    return LinearState(
        torch.zeros(slots + snapshots, heads, key_size, value_size),
        poison(key_heads, key_size, dtype=rows.k.dtype),
        poison(heads, value_size),
        poison(heads, BLOCK_ROWS),
        torch.full((*rings, heads), -(2**60)),
        torch.zeros(slots, INPUTS, channels, dtype=rows.k.dtype),
        torch.zeros(snapshots, TAPS - 1, channels, dtype=rows.k.dtype),
    )


def linear_sequence(first_row, count, start, slot=0, drafts=False, standing=None, snapshots=()):
    """A sequence of a batch; standing: of a step that came before it without drafts if None."""
    if standing is None:
        standing = max(start - 1, 0) // CHUNK_TOKENS
    pages = tuple(range(-(-(start + count) // PAGE_TOKENS)))
    return PagedSequence(first_row, count, start, pages, slot, standing, drafts, snapshots)


def kept_at_cuts(rule, rows, chunks):
    """The states at the start of each of these chunks, of a prompt that ends there.

    rule: the module of `gated_delta` and `advance_states`.
    """
    kept = []
    for chunk in chunks:
        alone, state = rows.at(0, chunk * CHUNK_TOKENS), poisoned_state(rows, 1, 1)
        device = rows.q.device
        state = LinearState(*(part.to(device) for part in state))
        sequence = linear_sequence(0, len(alone.q), 0)
        rule.gated_delta(*alone, state, make_batch((sequence,), device))
        rule.advance_states((state,), (StateMove(0, 1, chunk - 1),))
        kept.append(state.boundary[1])
    return torch.stack(kept)
