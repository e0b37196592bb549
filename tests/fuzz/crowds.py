"""Crowds of requests in every configuration of a server, against each request alone."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.fuzz.answers import Answer, ask, ask_in, difference, give_up
from tests.fuzz.draws import Asked, asked_in, crowd_of, ways_of
from tests.fuzz.models import make
from tests.fuzz.server import Server

_FEW = ("--kv-pages", "6", "--max-num-seqs", "8")
_SECONDS = 600.0


class Configuration(NamedTuple):
    """A server's flags, and how often it is asked the same (the second time its cache is hot)."""

    tp: int
    flags: tuple[str, ...]
    times: int = 1


ALONE = Configuration(1, ("--kv-pages", "64", "--drafts", "off", "--no-enable-prefix-caching"))
CONFIGURATIONS = {
    "prefix cache": Configuration(1, ("--kv-pages", "64", "--drafts", "earlier"), times=2),
    "six pages": Configuration(
        1, (*_FEW, "--max-num-batched-tokens", "600", "--no-enable-prefix-caching")
    ),
    "six pages, two ranks": Configuration(2, (*_FEW, "--drafts", "earlier")),
}
_COUNTED = {
    "preemptions": "tpdet_preemptions_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
}


@dataclass
class Found:
    """What one configuration gave: what was compared and differed, and what the server counted."""

    tp: int
    compared: int = 0
    given_up: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)


@dataclass
class Crowd:
    """The requests of a crowd, and the answer to each alone."""

    number: int
    bodies: list[dict[str, Any]]
    references: list[Answer] = field(default_factory=list)


class Fuzzer:
    """One family's crowds; `tell` is called with a line for each thing that is done."""

    def __init__(
        self, seed: int, family: str, folder: Path, tell: Callable[[str], None], planted: str = ""
    ) -> None:
        self._seed, self._family, self._folder = seed, family, folder
        self._tell, self._planted = tell, planted
        self._model = make(family, folder)

    def run(self, numbers: list[int], only: tuple[str, ...] = ()) -> dict[str, Found]:
        """What every configuration, or those named, gave of some crowds."""
        crowds = [Crowd(n, crowd_of(self._seed, self._family, n)) for n in numbers]
        found = {"alone": self._alone(crowds)}
        for name, configuration in CONFIGURATIONS.items():
            if not only or name in only:
                found[name] = self._together(name, configuration, crowds)
        return found

    def _alone(self, crowds: list[Crowd]) -> Found:
        """Take the references, one by one, and hold their streams against them."""
        found = Found(1)
        with self._served("alone", ALONE, "", found) as server:
            for crowd in crowds:
                asyncio.run(self._take_references(server, crowd, found))
        return found

    @contextmanager
    def _served(
        self, name: str, configuration: Configuration, planted: str, found: Found
    ) -> Iterator[Server]:
        """A server of a configuration; one that ends, or keeps pages, is a difference."""
        folder = self._folder / f"{self._family} {name}"
        server = Server(self._model, folder, configuration.tp, configuration.flags, planted)
        try:
            yield server
            found.counted = {key: int(server.count(name)) for key, name in _COUNTED.items()}
        except (httpx.HTTPError, RuntimeError) as error:
            said = f"{self._family}, {name}: {type(error).__name__} {error}: {server.log}"
            found.differences.append(said)
            self._tell(f"DIFFERENT: {said}")
        finally:
            server.stop()

    async def _take_references(self, server: Server, crowd: Crowd, found: Found) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=_SECONDS) as client:
            for place, body in enumerate(crowd.bodies):
                crowd.references.append(await ask(client, body))
                if "stream" in ways_of(body):
                    how = Asked("stream", 0.0, 0.0)
                    again = await ask_in(client, body, how, crowd.references[-1])
                    self._compare(found, "alone", crowd, place, how, again)

    def _together(self, name: str, configuration: Configuration, crowds: list[Crowd]) -> Found:
        found = Found(configuration.tp)
        planted = self._planted if configuration.tp == 1 else ""
        with self._served(name, configuration, planted, found) as server:
            for crowd in crowds:
                for turn in range(configuration.times):
                    asyncio.run(self._crowd(server, name, turn, crowd, found))
                    server.await_no_pages()
        return found

    async def _crowd(
        self, server: Server, name: str, turn: int, crowd: Crowd, found: Found
    ) -> None:
        """Ask everything at once."""
        where = f"{name} {turn}"
        asked, left = asked_in(self._seed, self._family, crowd.number, where, crowd.bodies)
        each = zip(crowd.bodies, asked, crowd.references, strict=True)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=_SECONDS, limits=limits
        ) as client:
            answers = await asyncio.gather(
                *(ask_in(client, body, how, reference) for body, how, reference in each),
                *(give_up(client, body, asked[place]) for place, body in enumerate(left)),
            )
        found.given_up += len(left)
        for place, how in enumerate(asked):
            self._compare(found, where, crowd, place, how, answers[place])

    def _compare(
        self, found: Found, where: str, crowd: Crowd, place: int, how: Asked, answer: Answer
    ) -> None:
        found.compared += 1
        found.ways[how.way] += 1
        seeded = "seed" in crowd.bodies[place]
        wrong = difference(crowd.references[place], answer, how.way, seeded)
        if wrong is not None:
            said = f"{self._family}, crowd {crowd.number}, request {place}, {where}, {how.way}"
            again = f"python -m tests.fuzz {self._seed} 1 {self._family} --crowd {crowd.number}"
            found.differences.append(f"{said}: {wrong}")
            self._tell(f"DIFFERENT: {found.differences[-1]}; again: {again}")
