"""The tensors of linear-attention states: a slot for each running sequence, and snapshots.

Sequences' slots are numbered as in the plan (`state_table.py`). One where pad rows write follows,
of which no plan knows; snapshots are numbered from 0 on. A snapshot has what a sequence goes on
from at a page end: the state there, and the rows before it that the convolution reads. A ring holds
a row at its position mod the ring's length.
"""

from dataclasses import dataclass
from itertools import chain
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

    def snapshot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a snapshot, all layers; dtype: the model's."""
        tail = TAIL_ROWS * self.channels * dtype.itemsize
        return self.layers * (4 * prod(self.boundary) + tail)


@dataclass(frozen=True)
class StatePool:
    """The states of all linear layers of a rank: `running` sequences, pad rows, `snapshots`.

    layers: their rings have a place for each running sequence and one for pad rows; boundaries go
    on with snapshots. tails[i] [snapshots, 3, C]: the rows before each snapshot, of layer i.
    """

    running: int
    snapshots: int
    layers: tuple[LinearState, ...]
    tails: tuple[torch.Tensor, ...]

    @property
    def pad_slot(self) -> int:
        """Where pad rows write; nobody reads it."""
        return self.running

    def clear(self, slot: int) -> None:
        """Make a slot that of a sequence without rows."""
        for state in self.layers:
            state.boundary[slot].zero_()
            state.inputs[slot].zero_()

    def fill(self, value: float) -> None:
        """Write a value everywhere; integers become the largest ones."""
        for part in chain(*self.layers, self.tails):
            part.fill_(value if part.is_floating_point() else torch.iinfo(part.dtype).max)

    def restore(self, snapshot: int, slot: int, position: int) -> None:
        """Have a sequence go on at a snapshot's position, a chunk's start."""
        places = _tail_places(position)
        for state, tail in zip(self.layers, self.tails, strict=True):
            state.boundary[slot].copy_(state.boundary[self.boundary_of(snapshot)])
            state.inputs[slot, places] = tail[snapshot]

    def keep(self, slot: int, snapshot: int, position: int) -> None:
        """Copy a sequence's states at a chunk's start to a snapshot, as `keep_tail` its rows."""
        self.keep_tail(slot, snapshot, position)
        for state in self.layers:
            state.boundary[self.boundary_of(snapshot)].copy_(state.boundary[slot])

    def keep_tail(self, slot: int, snapshot: int, position: int) -> None:
        """Copy the rows before a position, from which on none is stored, to a snapshot."""
        places = _tail_places(position)
        for state, tail in zip(self.layers, self.tails, strict=True):
            tail[snapshot] = state.inputs[slot, places]

    def boundary_of(self, snapshot: int) -> int:
        """Where a snapshot's states lie among the boundaries."""
        return self.running + 1 + snapshot


def _tail_places(position: int) -> list[int]:
    """Where the rows before a position lie in the ring of inputs."""
    return [(position - i) % INPUT_ROWS for i in range(TAIL_ROWS, 0, -1)]


def allocate_states(
    shape: StateShape,
    running: int,
    snapshots: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> StatePool:
    """States of zeros. Raises ResourceError with the size in GiB when memory is short."""
    boundaries = running + 1 + snapshots
    try:
        layers = tuple(
            LinearState(
                torch.zeros((boundaries, *shape.boundary), device=device),
                *(
                    torch.zeros((running + 1, *part), dtype=kind, device=device)
                    for part, kind in shape.rings(dtype)
                ),
            )
            for _ in range(shape.layers)
        )
        tails = tuple(
            torch.zeros((snapshots, TAIL_ROWS, shape.channels), dtype=dtype, device=device)
            for _ in range(shape.layers)
        )
    except (RuntimeError, MemoryError) as error:
        size = (running + 1) * shape.slot_bytes(dtype) + snapshots * shape.snapshot_bytes(dtype)
        raise ResourceError(
            f"no memory for the states of {running} sequences and {snapshots} snapshots "
            f"({size / 2**30:.1f} GiB) on {device}: lower --max-num-seqs"
        ) from error
    return StatePool(running, snapshots, layers, tails)
