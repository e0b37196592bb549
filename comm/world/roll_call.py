"""The roll call: ranks report in a shared store that they arrived, and later why they end early.

A collective that fails knows that a peer is lost, but seldom which one. So each rank writes an
entry into the store where the ranks met when it arrives, and an exit reason when it ends early. A
rank that lost a peer reads the others' exit reasons: the lost peer gave up and reported why, or it
reported nothing and does not answer.

The store is torch's and trusts everybody who reaches it, so its entries only choose the text of an
error, never a step of the engine.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec
import torch.distributed as dist

from tpdet.errors import PeerLostError, UsageError
from tpdet.launch.ranks.node_name import Node, check_places, node_names

ROLL_SECONDS = 1.0
"""How long a rank that lost a peer waits for the others' exit reasons, and for the store."""
_REASON_SECONDS = 0.2
"""How long it waits for more of them once one rank has given up."""
_POLL_SECONDS = 0.02
_MAX_CHARACTERS = 1000
Result = TypeVar("Result")


class ExitReason(msgspec.Struct, frozen=True, array_like=True):
    """Why a rank ends: it `gave_up` because of an error, or (False) it lost a peer itself.

    `exit_code` and `code` are those of its error (tpdet.errors), `message` is the whole message
    and `public` the part of it that clients may read.
    """

    gave_up: bool
    exit_code: int = PeerLostError.exit_code
    code: str = PeerLostError.code
    public: str = ""
    message: str = ""


class PeerReasons(msgspec.Struct, frozen=True):
    """The other ranks' exit reasons, by rank; `store_answers` is False if the store is lost."""

    reasons: dict[int, ExitReason]
    store_answers: bool = True


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """The entry of a rank that arrives: its node and, if known, (local rank, local size) there."""

    node: Node
    local_place: tuple[int, int] | None


_reason_decoder = msgspec.json.Decoder(ExitReason)
_arrival_decoder = msgspec.json.Decoder(Arrival)


class RollCall:
    """One rank's part in the roll call of a world of `size` ranks; each world has its own `store`.

    A rank that `hosts_store` stays until the others have read the store, or their time is over.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, hosts_store: bool) -> None:
        self._store, self._rank, self._size, self._hosts = store, rank, size, hosts_store

    def arrive(
        self,
        node: Node,
        expected: Sequence[str],
        limit: float,
        local_place: tuple[int, int] | None = None,
        watch: Callable[[], None] | None = None,
    ) -> tuple[str, ...]:
        """Wait until all ranks have arrived, at most `limit` seconds; returns their nodes' names.

        expected: the names that the launcher knows, by rank, or (). local_place: this rank's local
        rank and local size; all ranks give it, or none. watch: called while this rank waits; may
        raise. Raises PeerLostError naming the missing ranks and the nodes of the others, UsageError
        for local places that contradict each other.
        """
        arrival = Arrival(node, local_place)
        self._store.set(f"arrived/{self._rank}", msgspec.json.encode(arrival).decode())
        deadline, came = time.monotonic() + limit, dict[int, Arrival]()
        while True:
            came |= self._read("arrived", came, _arrival_decoder.decode)
            if len(came) == self._size:
                break
            if watch is not None:
                watch()
            if time.monotonic() > deadline:
                nodes = {rank: arrival.node for rank, arrival in came.items()}
                raise PeerLostError(self._missing(nodes, expected, limit))
            time.sleep(_POLL_SECONDS)
        arrivals = [came[rank] for rank in range(self._size)]
        names = node_names([arrival.node for arrival in arrivals])
        places = [arrival.local_place for arrival in arrivals]
        self._check(names, [place for place in places if place is not None])
        return names

    def _check(self, names: Sequence[str], places: Sequence[tuple[int, int]]) -> None:
        """Raise UsageError for places that contradict each other, once all have seen them."""
        try:
            if len(places) == len(names):
                check_places(names, places)
        except UsageError:
            self._store.set(f"refused/{self._rank}", "1")
            deadline, seen = time.monotonic() + ROLL_SECONDS, dict[int, bytes]()
            # The store ends with its host, which the others would mistake for a lost rank.
            while self._hosts and len(seen) < self._size and time.monotonic() < deadline:
                seen |= self._read("refused", seen, bytes)
                time.sleep(_POLL_SECONDS)
            raise

    def report(self, reason: ExitReason, seconds: float = ROLL_SECONDS) -> PeerReasons:
        """Write this rank's exit reason; returns the others'.

        A rank that did not give up, but lost a peer, waits for them, at most `seconds`. Returns in
        time even if the store's host is cut off, and raises nothing.
        """
        reasons: dict[int, ExitReason] = {}
        answered = threading.Event()
        public, message = reason.public[:_MAX_CHARACTERS], reason.message[:_MAX_CHARACTERS]
        reason = msgspec.structs.replace(reason, public=public, message=message)

        def call() -> None:
            with suppress(Exception):  # the store is gone: `answered` stays unset
                self._store.set(f"exit/{self._rank}", msgspec.json.encode(reason).decode())
                reasons.update(self._read("exit", reasons, _reason_decoder.decode))
                answered.set()
                if self._hosts or not reason.gave_up:
                    self._await_reasons(reasons, time.monotonic() + seconds)

        # A store whose host is cut off may hold a call for minutes.
        caller = threading.Thread(target=call, name="roll call", daemon=True)
        caller.start()
        caller.join(seconds + _REASON_SECONDS)
        others = {rank: other for rank, other in reasons.copy().items() if rank != self._rank}
        return PeerReasons(others, answered.is_set())

    def _await_reasons(self, reasons: dict[int, ExitReason], deadline: float) -> None:
        while len(reasons) < self._size and time.monotonic() < deadline:
            reasons.update(self._read("exit", reasons, _reason_decoder.decode))
            if not self._hosts and any(reason.gave_up for reason in reasons.values()):
                deadline = min(deadline, time.monotonic() + _REASON_SECONDS)
            time.sleep(_POLL_SECONDS)
        if self._hosts:
            time.sleep(5 * _POLL_SECONDS)  # the last to write has yet to read

    def _read(
        self, kind: str, known: dict[int, Result], decode: Callable[[bytes], Result]
    ) -> dict[int, Result]:
        """The entries of one kind that are not `known` yet, by rank."""
        entries = {}
        for rank in range(self._size):
            key = f"{kind}/{rank}"
            if rank not in known and self._store.check([key]):
                entries[rank] = decode(self._store.get(key))
        return entries

    def _missing(self, came: dict[int, Node], expected: Sequence[str], limit: float) -> str:
        missing = [rank for rank in range(self._size) if rank not in came]
        names = node_names([came[rank] for rank in sorted(came)])
        here = rank_list(sorted(came), dict(zip(sorted(came), names, strict=True)))
        there = rank_list(missing, dict(enumerate(expected)))
        return (
            f"rank {self._rank} of {self._size} waited {limit:g} s for all ranks; missing: {there};"
            f" arrived: {here}: look at the logs of the missing ones, check that their nodes are up"
            " and reach the port where ranks meet (docs/cluster.md), or raise --start-timeout"
        )


def rank_list(ranks: Sequence[int], nodes: dict[int, str]) -> str:
    """The ranks in words, node by node: "ranks 2, 3 on node gpu07"; without nodes "ranks 2, 3"."""
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(nodes.get(rank, ""), []).append(rank)
    return " and ".join(
        ("rank " if len(members) == 1 else "ranks ")
        + ", ".join(map(str, members))
        + (f" on node {node}" if node else "")
        for node, members in by_node.items()
    )
