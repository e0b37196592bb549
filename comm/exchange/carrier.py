"""Carriers: what moves small payloads for an exchange, watches for lost peers and owns its memory.

An exchange holds a carrier and adds the arithmetic. Two exchanges of one world may share what the
carrier offers and differ in their sums alone.

    WorldCarrier   the world's collectives: any transport, any device; they raise by themselves
    NodeCarrier    the same, and it watches the peers inside a node
    PeerCarrier    peer memory (`peer_carrier.py`)
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from tpdet.comm.exchange.peer_memory import PeerMemory
from tpdet.comm.world.world import World


class Carrier(Protocol):
    """What every exchange offers beside its arithmetic; collective methods say so.

    After each step, once the GPU has done it, `check()` says whether a peer was lost in it: a
    kernel that waits cannot raise. It gives up after `set_timeout` seconds and leaves garbage.
    """

    @property
    def world(self) -> World:
        """The ranks that exchange."""

    @property
    def memory(self) -> PeerMemory | None:
        """Memory that all ranks can address; None where there is none."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's small `x`, copied bit for bit: [ranks, *x.shape]. Collective."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """While inside, no kernel and no tensor operation of the world really runs.

        What the host counts is afterwards as before, however many exchanges each rank had inside.
        """

    def report(self) -> None:
        """Launch the copy that brings to the host what `check` reads; the last of a step."""

    def check(self) -> None:
        """Raise PeerLostError if an exchange before the last finished report lost a peer."""

    def set_timeout(self, seconds: float) -> None:
        """Wait at most `seconds` for a peer from now on; alike on every rank."""


class WorldCarrier:
    """The world's collectives: any transport, any device."""

    memory: PeerMemory | None = None

    def __init__(self, world: World) -> None:
        self.world = world

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The world's all-gather. Raises PeerLostError."""
        return self.world.all_gather(x)

    def rehearsal(self) -> AbstractContextManager[None]:
        """The host counts nothing here."""
        return nullcontext()

    def report(self) -> None:
        """Do nothing: see `check`."""

    def check(self) -> None:
        """Do nothing: the world's operations raise by themselves."""

    def set_timeout(self, seconds: float) -> None:
        """Do nothing: `World.set_timeout` bounds the world's operations."""


class NodeCarrier(WorldCarrier):
    """The whole world's collectives; it watches the peers inside this node through theirs."""

    def __init__(self, world: World, inside: Carrier) -> None:
        """inside: the carrier of the node's ranks. Across nodes the world's operations raise."""
        super().__init__(world)
        self._inside = inside

    def rehearsal(self) -> AbstractContextManager[None]:
        """The node's."""
        return self._inside.rehearsal()

    def report(self) -> None:
        """Report the peers inside the node."""
        self._inside.report()

    def check(self) -> None:
        """Raise PeerLostError for a lost peer inside the node."""
        self._inside.check()

    def set_timeout(self, seconds: float) -> None:
        """Bound the waits for peers inside the node."""
        self._inside.set_timeout(seconds)
