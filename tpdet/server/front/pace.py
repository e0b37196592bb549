"""Runs long work on the event loop in slices, so that other tasks get their turn.

A slice ends with the first item that is done after SLICE_SECONDS. Work that ends within its first
slice just runs. Longer work takes turns, one slice at a time, so that many large answers delay
`/health` and other streams no more than one does.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from time import perf_counter
from typing import TypeVar

SLICE_SECONDS = 0.002
CHUNK_CHARACTERS = 64 << 10  # of an answer that is sent at once
Item = TypeVar("Item")


class Turns:
    """The turns of one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def slices(self, items: Iterator[Item]) -> AsyncIterator[list[Item]]:
        """All items, a list for each slice; the last list may be empty."""
        found, ended = _slice(items)
        yield found
        while not ended:
            async with self._turn:
                await asyncio.sleep(0)
                found, ended = _slice(items)
            yield found

    async def last(self, items: Iterator[Item]) -> Item:
        """The last item, once all are done. Raises ValueError if there is none."""
        last: list[Item] = []
        async for found in self.slices(items):
            last = found or last
        if not last:
            raise ValueError("there is no item")
        return last[-1]

    async def chunks(self, pieces: Iterator[str]) -> AsyncIterator[bytes]:
        """The pieces' UTF-8, in chunks that are worth a write."""
        waiting: list[str] = []
        size = 0
        async for found in self.slices(pieces):
            waiting += found
            size += sum(map(len, found))
            if size >= CHUNK_CHARACTERS:
                yield "".join(waiting).encode("utf-8")
                waiting, size = [], 0
        if waiting:
            yield "".join(waiting).encode("utf-8")


def _slice(items: Iterator[Item]) -> tuple[list[Item], bool]:
    """The items of one slice, and whether they are the last."""
    deadline = perf_counter() + SLICE_SECONDS
    found: list[Item] = []
    for item in items:
        found.append(item)
        if perf_counter() > deadline:
            return found, False
    return found, True
