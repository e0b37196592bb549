"""Arguments of the exchange kernels as flat named tuples, and the peers that the host holds.

`Links` and `OwnSums` are run-time arguments; the other tuples are compile-time ones. No tuple lies
inside another: Triton 3.6 forgets the names of fields that lie deeper. Tuples that do not change
are made once: a launch costs the host less with them than with their fields one by one.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import torch

WIDEST: Final = 1 << 14
"""Values of a row, at most."""

OFFSETS: Final = 1 << 31
"""Offsets into sums and buffers stay below this."""

LOST_BASE: Final = 256
"""A lost wait is recorded as number of the exchange * LOST_BASE + rank that was lost + 1."""


def everyone_owns(m: int, ranks: int) -> bool:
    """Whether each rank owns at least one row: in a two-shot all must wait for all."""
    return (ranks - 1) * -(-m // ranks) < m


class Links(NamedTuple):
    """Where a kernel finds its peers and its control words, all on this rank's GPU.

    table: int64 [ranks], addresses of everyone's shared memory as seen from here; counter: int64
    [2], the number of the next exchange of this kind, and programs that have read it; control:
    int64 [2], the lost wait (0: none) and nanoseconds to wait.
    """

    table: torch.Tensor
    counter: torch.Tensor
    control: torch.Tensor


class OwnSums(NamedTuple):
    """A rank's own sums [C, M, N] fp32: contiguous planes of M rows, `stride` values apart.

    No field is named "values": a tuple of Triton has such an attribute.
    """

    planes: torch.Tensor
    stride: int


class Phases(NamedTuple):
    """Which phases of an exchange a launch runs: all of them; tests run them apart, in this order.

    take: the last phase, of every exchange but the one-shot, which ends with `fold`.
    """

    push: bool = True
    fold: bool = True
    take: bool = True


ALL_PHASES: Final = Phases()


class KernelWorld(NamedTuple):
    """Which of how many ranks a kernel runs on; live: it polls until words come (tests: once)."""

    rank: int
    ranks: int
    live: bool


class Slots(NamedTuple):
    """Two sets of slots in a rank's shared memory: [2, ranks, roots, rows, N], or [2, rows, N].

    start: the first word, counted in words of the slots' size; rows: that a set has room for;
    roots: fp32 roots that a rank sends of a row.
    """

    start: int
    rows: int
    roots: int = 1


class Buffers(NamedTuple):
    """Two buffers of shared memory, taken in turn. start: where they begin; room: of each.

    The host counts bytes; a kernel counts words of the size that it moves.
    """

    start: int
    room: int

    def words(self, size: int) -> "Buffers":
        """The same in words of `size` bytes."""
        return Buffers(self.start // size, self.room // size)


class Flags(NamedTuple):
    """Flags [ranks, programs] of 4 bytes that peers raise. start: the first one, in words."""

    start: int
    programs: int


@dataclass(frozen=True)
class Peers:
    """What the host gives every kernel of one kind of exchange.

    table, counter, control: see `Links`; the counter is zero at first. programs: how many run at
    once; warps: of a program, by the width of a row if None; tile: rows of a two-shot's program at
    once, by their number if None; live: see `KernelWorld`.
    """

    rank: int
    table: torch.Tensor
    counter: torch.Tensor
    control: torch.Tensor
    programs: int
    warps: int | None = None
    tile: int | None = None
    live: bool = True

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.table.shape[0]

    @cached_property
    def links(self) -> Links:
        """What a kernel is given at run time."""
        return Links(self.table, self.counter, self.control)

    @cached_property
    def world(self) -> KernelWorld:
        """What a kernel is compiled for."""
        return KernelWorld(self.rank, self.ranks, self.live)
