"""The world: the ranks that run one engine, and their collective operations.

A world is an object that its users pass on; there is no global group. Every rank calls the same
operations in the same order, from one thread. There are no tags: the n-th call of one rank meets
the n-th call of every other. Patterns of use:

    gathered = world.all_gather(partial)          # [size, *partial.shape], rank order, same bits
    mine = world.all_to_all(blocks)               # block r goes to rank r; mine[s] is from rank s
    plan = world.broadcast_bytes(encode(plan) if world.rank == 0 else None)   # rank 0 sends
    digests = world.gather_bytes(table_digest)    # all send, any lengths; everyone gets all
    world.barrier()                               # returns when every rank has called it
    world.close()                                 # the last call; a second one is harmless

A collective moves bits and never adds: NaN payloads, -0.0 and pad bytes arrive as they were sent.
Only `add_in_any_order`, which is for the approximate mode, adds. `all_gather` and `all_to_all` need
one shape and dtype on all ranks, and return memory that no later call writes to.

A peer that dies, leaves, stops or calls another operation ends the call with PeerLostError, which
names the operation, this rank and the timeout. A dead peer does so at once, a silent one after
`timeout` seconds. The world is broken then: each later call but `close()` raises the error again.
So an idle rank 0 must send more often than the timeout (heartbeats), and a phase in which ranks
need longer (loading weights) runs under a longer timeout:

    world.set_timeout(1800.0); load(); world.barrier(); world.set_timeout(config.step_timeout)

Some of the ranks can form a part, which is a world too; it breaks and ends with the whole:

    inside = world.part([[0, 1], [2, 3]])         # every rank calls it, with the same groups
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from tpdet.comm.world.roll_call import ExitReason, PeerReasons
from tpdet.errors import IntegrityError
from tpdet.launch.ranks.node_name import this_node
from tpdet.launch.ranks.rank_environment import RankEnvironment

MAX_MESSAGE_BYTES = 80 << 20
"""Largest byte message: the largest step plan (64 MiB) with its digest, and some reserve."""


class World(Protocol):
    """The operations of an engine's ranks; the module's docstring shows their use.

    `rank` counts from 0 to `size - 1`; `local_rank` counts from 0 to `local_size - 1` among the
    ranks of this host. `timeout` is in seconds. `node_names` has the name of each rank's node:
    ranks with one name are on one node. Launchers assign ranks to nodes in any order.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    timeout: float
    node_names: tuple[str, ...]

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, copied bit for bit: [size, *x.shape], dtype and device of `x`."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [size, ...], block r for rank r -> [size, ...], block s from rank s; bits copied."""

    def add_in_any_order(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, equal on all ranks; the library chooses the order.

        For the approximate mode only: no bit of it is promised. `x` may be overwritten.
        """

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's `data` on every rank; the argument of the other ranks is ignored."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's `data` in rank order, on every rank; lengths may differ."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def part(self, groups: Sequence[Sequence[int]]) -> "World":
        """The world of the group that holds this rank; its ranks count in the group's order.

        Collective. groups: equal on every rank; each rank is in one of them. A part has the
        timeout of the whole and ends with it; closing a part does nothing. A part has no parts.
        """

    def without_peers(self) -> AbstractContextManager[None]:
        """While inside, send no tensors: whatever would come from peers is zeros.

        For work whose results nobody reads; peers need not take part. Byte messages are still sent.
        """

    def set_timeout(self, seconds: float) -> None:
        """Wait at most `seconds` for a peer from the next operation on; alike on every rank."""

    def end_early(self, reason: ExitReason) -> PeerReasons:
        """End this world for this rank; returns the reasons of other ranks that ended early too.

        Peers that wait for this rank lose it and find `reason`. A rank that does not give up, but
        lost a peer itself, waits a second for the reasons of others. See `exit_reasons`.
        """

    def close(self) -> None:
        """Leave the world. All ranks of a healthy world leave together."""


class NoPeers:
    """What a world does whose other ranks, if it has any, are not there: nothing can be lost."""

    size = 1
    timeout = float("inf")

    def add_in_any_order(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """`data` itself. Raises IntegrityError if it is absent or over the cap."""
        return checked_message(data)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """`data` for every rank. Raises IntegrityError if it is over the cap."""
        return [checked_message(data)] * self.size

    def barrier(self) -> None:
        """Return at once."""

    def without_peers(self) -> AbstractContextManager[None]:
        """Do nothing: there are no peers."""
        return nullcontext()

    def set_timeout(self, seconds: float) -> None:
        """Store the number; there is no peer to wait for."""
        self.timeout = seconds

    def end_early(self, reason: ExitReason) -> PeerReasons:
        """Do nothing: there are no peers."""
        return PeerReasons({})

    def close(self) -> None:
        """Do nothing."""


class SoloWorld(NoPeers):
    """A world of one rank: nothing is sent, and no peer can be lost."""

    def __init__(self) -> None:
        self.rank = self.local_rank = 0
        self.local_size = 1
        self.node_names: tuple[str, ...] = (this_node(RankEnvironment()).name,)

    def all_gather(self, x: Tensor) -> Tensor:
        """A copy of `x` with a leading dimension of 1."""
        return x.unsqueeze(0).clone(memory_format=torch.contiguous_format)

    def all_to_all(self, x: Tensor) -> Tensor:
        """A copy of `x` [1, ...]."""
        return x.clone(memory_format=torch.contiguous_format)

    def part(self, groups: Sequence[Sequence[int]]) -> "SoloWorld":
        """Another world of one rank."""
        group_of(0, 1, groups)
        return SoloWorld()


def rank_on_node(world: World, rank: int | None = None) -> str:
    """A rank in words: "rank 3 on node gpu07"; the world's own rank if None."""
    rank = world.rank if rank is None else rank
    return f"rank {rank} on node {world.node_names[rank]}"


def group_of(rank: int, size: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """The group of `rank`. Raises ValueError unless each of `size` ranks is in just one group."""
    if sorted(member for group in groups for member in group) != list(range(size)):
        raise ValueError(f"groups {groups} of a world of {size}: name each rank once")
    return next(group for group in groups if rank in group)


def local_place(world: World, group: Sequence[int]) -> tuple[int, int]:
    """(local_rank, local_size) of `world`'s rank in the part `group`: counted within its node."""
    names = world.node_names
    here = [member for member in group if names[member] == names[world.rank]]
    return here.index(world.rank), len(here)


def checked_message(data: bytes | None) -> bytes:
    """`data` itself. Raises IntegrityError for None and for more than MAX_MESSAGE_BYTES."""
    if data is None:
        raise IntegrityError("rank 0 must pass the bytes it broadcasts, not None")
    if len(data) > MAX_MESSAGE_BYTES:
        raise IntegrityError(
            f"message of {len(data)} bytes is over the cap of {MAX_MESSAGE_BYTES} bytes: send less"
        )
    return data
