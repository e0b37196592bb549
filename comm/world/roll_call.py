"""The roll call of a world's ranks, over the store where they met: who came, and who was lost.

A collective that fails knows that somebody is lost, seldom who. So ranks write into the store when
they arrive, and once more when they end early: their last word. Those who lost a peer read the
others' words: one gave up, and said why; or it said nothing, and does not answer.

The store is torch's, which believes everybody: its words choose what an error says, never a step.
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
"""How long a rank that lost a peer waits for the others' words, and for the store."""
_REASON_SECONDS = 0.2
"""How long it waits for more words once one of them says why."""
_POLL_SECONDS = 0.02
_MAX_CHARACTERS = 1000
Result = TypeVar("Result")


class LastWord(msgspec.Struct, frozen=True, array_like=True):
    """Why a rank ends: it `gave_up` for a reason of its own, or lost a peer itself.

    `exit_code` and `code` are those of its error (tpdet.errors), `public` what clients may read of
    it, `reason` the whole.
    """

    gave_up: bool
    exit_code: int = PeerLostError.exit_code
    code: str = PeerLostError.code
    public: str = ""
    reason: str = ""


class Heard(msgspec.Struct, frozen=True):
    """The words of other ranks, by rank; `store_answers` is False if nobody could be asked."""

    words: dict[int, LastWord]
    store_answers: bool = True


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """What a rank writes when it comes: its node and, if given, (local rank, local size) there."""

    node: Node
    local_place: tuple[int, int] | None


_word_decoder = msgspec.json.Decoder(LastWord)
_arrival_decoder = msgspec.json.Decoder(Arrival)


class RollCall:
    """One rank's part in the roll call of a world of `size` ranks; `store` is this world's own.

    A rank that `hosts_store` stays until the others have read it, or for their time.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, hosts_store: bool) -> None:
        self._store, self._rank, self._size, self._hosts = store, rank, size, hosts_store

    def arrive(
        self,
        node: Node,
        expected: Sequence[str],
        limit: float,
        local_place: tuple[int, int] | None = None,
    ) -> tuple[str, ...]:
        """Wait until all ranks have come, at most `limit` seconds; the names of their nodes.

        expected: those names as far as the launcher tells them, or (). local_place: this rank's
        local rank and local size, alike given or not by all. Raises PeerLostError naming the ranks
        that are missing, and who came from where; UsageError for local places that contradict each
        other.
        """
        arrival = Arrival(node, local_place)
        self._store.set(f"arrived/{self._rank}", msgspec.json.encode(arrival).decode())
        deadline, came = time.monotonic() + limit, dict[int, Arrival]()
        while True:
            came |= self._read("arrived", came, _arrival_decoder.decode)
            if len(came) == self._size:
                break
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
            # The store ends with its host: the others would take that for a lost rank.
            while self._hosts and len(seen) < self._size and time.monotonic() < deadline:
                seen |= self._read("refused", seen, bytes)
                time.sleep(_POLL_SECONDS)
            raise

    def part(self, word: LastWord, seconds: float = ROLL_SECONDS) -> Heard:
        """Leave a last word; whoever lost a peer also waits, up to `seconds`, for the others'.

        Returns in time even if the store's host is cut off, and raises nothing.
        """
        words: dict[int, LastWord] = {}
        answered = threading.Event()
        cut = {"public": word.public[:_MAX_CHARACTERS], "reason": word.reason[:_MAX_CHARACTERS]}
        word = msgspec.structs.replace(word, **cut)

        def call() -> None:
            with suppress(Exception):  # a store that is gone: nothing answers
                self._store.set(f"word/{self._rank}", msgspec.json.encode(word).decode())
                words.update(self._read("word", words, _word_decoder.decode))
                answered.set()
                if self._hosts or not word.gave_up:
                    self._listen(words, time.monotonic() + seconds)

        # A store whose host is cut off may hold a call for minutes.
        caller = threading.Thread(target=call, name="roll call", daemon=True)
        caller.start()
        caller.join(seconds + _REASON_SECONDS)
        return Heard({r: w for r, w in words.copy().items() if r != self._rank}, answered.is_set())

    def _listen(self, words: dict[int, LastWord], deadline: float) -> None:
        while len(words) < self._size and time.monotonic() < deadline:
            words.update(self._read("word", words, _word_decoder.decode))
            if not self._hosts and any(word.gave_up for word in words.values()):
                deadline = min(deadline, time.monotonic() + _REASON_SECONDS)
            time.sleep(_POLL_SECONDS)
        if self._hosts:
            time.sleep(5 * _POLL_SECONDS)  # the last to write has yet to read

    def _read(
        self, kind: str, known: dict[int, Result], decode: Callable[[bytes], Result]
    ) -> dict[int, Result]:
        """What ranks have written and is not `known` yet, by rank."""
        found = {}
        for rank in range(self._size):
            key = f"{kind}/{rank}"
            if rank not in known and self._store.check([key]):
                found[rank] = decode(self._store.get(key))
        return found

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
    """The ranks, node by node: "ranks 2, 3 on node gpu07"; without nodes, "ranks 2, 3"."""
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(nodes.get(rank, ""), []).append(rank)
    return " and ".join(
        ("rank " if len(members) == 1 else "ranks ")
        + ", ".join(map(str, members))
        + (f" on node {node}" if node else "")
        for node, members in by_node.items()
    )
