"""The tensors of linear-attention states: a slot for each running sequence, and snapshots.

Sequences' slots are numbered as in the plan (`state_table.py`). One where pad rows write follows,
of which no plan knows; snapshots are numbered from 0 on. A snapshot has what a sequence goes on
from at a page end: the state there, and the rows before it that the convolution reads. A ring holds
a row at its position mod the ring's length.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from tpdet.errors import ResourceError
from tpdet.kernels.inputs.linear_state import BLOCK_ROWS, LinearState
from tpdet.kernels.order import CHUNK_TOKENS, CONVOLUTION_TAPS

RING_ROWS = 2 * CHUNK_TOKENS
"""Rows kept of the open chunk, and of the next one: a run of drafts may cross one chunk end."""
INPUT_ROWS = 2 * CHUNK_TOKENS
"""Rows kept before the convolution: a run of drafts has three fewer, for those before it."""
TAIL_ROWS = CONVOLUTION_TAPS - 1
"""Rows before a row that its convolution reads."""


@dataclass(frozen=True)
class StateShape:
    """Heads of a linear layer on one rank, and their sizes; layers of the model that are linear."""

    layers: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def channels(self) -> int:
        """Values of a row before the convolution: of queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def boundary(self) -> tuple[int, ...]:
        """A state's shape."""
        return self.value_heads, self.key_size, self.value_size

    def rings(self, dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and dtype of a slot's keys, updates, inverses, decays and inputs."""
        return (
            ((RING_ROWS, self.key_heads, self.key_size), dtype),
            ((RING_ROWS, self.value_heads, self.value_size), torch.float32),
            ((RING_ROWS, self.value_heads, BLOCK_ROWS), torch.float32),
            ((RING_ROWS, self.value_heads), torch.int64),
            ((INPUT_ROWS, self.channels), dtype),
        )

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a sequence's slot, all layers; dtype: the model's."""
        rings = sum(prod(part) * kind.itemsize for part, kind in self.rings(dtype))
        return self.layers * (4 * prod(self.boundary) + rings)

    def read_bytes(self, dtype: torch.dtype) -> float:
        """Bytes of a slot that a row which is a sequence's only one reads in one layer, on average.

        That is the state at the chunk's start, and half of a chunk's rows.
        """
        keys, updates, inverses, decays, _ = self.rings(dtype)
        row = sum(
            prod(part[1:]) * kind.itemsize for part, kind in (keys, updates, inverses, decays)
        )
        return 4 * prod(self.boundary) + (CHUNK_TOKENS - 1) / 2 * row

    def snapshot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a snapshot, all layers; dtype: the model's."""
        tail = TAIL_ROWS * self.channels * dtype.itemsize
        return self.layers * (4 * prod(self.boundary) + tail)


@dataclass(frozen=True)
class StatePool:
    """The states of all linear layers of a rank: `running` sequences, pad rows, `snapshots`.

    whole: those of L layers in one tensor of each kind [L, ...]; its rings have a place for each
    running sequence and one for pad rows; boundaries go on with snapshots.
    """

    running: int
    snapshots: int
    whole: LinearState

    @cached_property
    def layers(self) -> tuple[LinearState, ...]:
        """The state of each layer, views of `whole`."""
        return tuple(LinearState(*parts) for parts in zip(*self.whole, strict=True))

    @property
    def pad_slot(self) -> int:
        """Where pad rows write; nobody reads it."""
        return self.running

    def clear(self, slot: int) -> None:
        """Make a slot that of a sequence without rows, before which three of zeros stand."""
        self.whole.boundary[:, slot].zero_()
        self._tail(slot, 0).zero_()

    def fill(self, value: float) -> None:
        """Write a value everywhere; integers become the largest ones."""
        for part in self.whole:
            part.fill_(value if part.is_floating_point() else torch.iinfo(part.dtype).max)

    def restore(self, snapshot: int, slot: int, position: int) -> None:
        """Have a sequence go on at a snapshot's position, a chunk's start."""
        boundary = self.whole.boundary
        boundary[:, slot].copy_(boundary[:, self.boundary_of(snapshot)])
        self._tail(slot, position).copy_(self.whole.tails[:, snapshot])

    def keep(self, slot: int, snapshot: int, position: int) -> None:
        """Copy a sequence's states at a chunk's start to a snapshot, as `keep_tail` its rows."""
        self.keep_tail(slot, snapshot, position)
        boundary = self.whole.boundary
        boundary[:, self.boundary_of(snapshot)].copy_(boundary[:, slot])

    def keep_tail(self, slot: int, snapshot: int, position: int) -> None:
        """Copy the rows before a chunk's start, from which on none is stored, to a snapshot."""
        self.whole.tails[:, snapshot].copy_(self._tail(slot, position))

    def boundary_of(self, snapshot: int) -> int:
        """Where a snapshot's states lie among the boundaries."""
        return boundary_of(self.running + snapshot)

    def _tail(self, slot: int, position: int) -> torch.Tensor:
        """The rows before a chunk's start in a slot's ring of inputs [L, 3, C], a view."""
        first = (position - TAIL_ROWS) % INPUT_ROWS
        return self.whole.inputs[:, slot, first : first + TAIL_ROWS]


def allocate_states(
    shape: StateShape,
    running: int,
    snapshots: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> StatePool:
    """States of zeros. Raises ResourceError with the size in GiB when memory is short."""
    layers, boundaries = shape.layers, running + 1 + snapshots
    try:
        boundary = torch.zeros((layers, boundaries, *shape.boundary), device=device)
        rings = [
            torch.zeros((layers, running + 1, *part), dtype=kind, device=device)
            for part, kind in shape.rings(dtype)
        ]
        tails = torch.zeros(
            (layers, snapshots, TAIL_ROWS, shape.channels), dtype=dtype, device=device
        )
    except (RuntimeError, MemoryError) as error:
        size = (running + 1) * shape.slot_bytes(dtype) + snapshots * shape.snapshot_bytes(dtype)
        raise ResourceError(
            f"no memory for the states of {running} sequences and {snapshots} snapshots "
            f"({size / 2**30:.1f} GiB) on {device}: lower --max-num-seqs"
        ) from error
    return StatePool(running, snapshots, LinearState(*[boundary, *rings, tails]))


def boundary_of(slot: int) -> int:
    """Where the states of a plan's slot of a snapshot lie: behind those of pad rows."""
    return slot + 1
