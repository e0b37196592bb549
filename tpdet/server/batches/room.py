"""The room that batches may take: what nobody else waits for, and never more than half of all.

The engine serves requests in the order in which they come. So batches have the lowest priority at
its door: none of their requests is sent to it while any other waits.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from tpdet.kernels.order import PAGE_TOKENS
from tpdet.requests.body import limits
from tpdet.requests.body.prepare import Call
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.middleware import ClientGone

PAUSE_SECONDS = 0.002


class Share(NamedTuple):
    """What a call takes of the engine: sequences, KV pages at their ends, tokens of prompts."""

    sequences: int
    pages: int
    prompt_tokens: int

    @classmethod
    def of(cls, call: Call) -> "Share":
        """The share of a call whose answers are as long as they may be."""
        prompts = [len(request.prompt_token_ids) for request in call.requests]
        longest = [
            length + (request.params.max_tokens or 0)
            for length, request in zip(prompts, call.requests, strict=True)
        ]
        pages = call.choices * sum(-(-length // PAGE_TOKENS) for length in longest)
        return cls(len(prompts) * call.choices, pages, sum(prompts))


class BatchRoom:
    """Lets calls of batches in, one after another in their order."""

    def __init__(self, client: EngineClient, seats: int) -> None:
        """seats: sequences that the engine computes at once, at most."""
        self._client = client
        self.most = max(1, min(limits.MAX_BATCH_SEQUENCES, seats // 2))
        self._order = asyncio.Lock()
        self._taken: list[Share] = []

    @asynccontextmanager
    async def place(self, call: Call, gone: "asyncio.Future[None]") -> AsyncIterator[None]:
        """Wait until the call may begin, and hold its place. Raises ClientGone if `gone` before."""
        share = Share.of(call)
        async with self._order:
            while not self._is_open(share):
                await asyncio.sleep(PAUSE_SECONDS)
                if gone.done():
                    raise ClientGone
            self._taken.append(share)
        try:
            yield
        finally:
            self._taken.remove(share)

    def _is_open(self, share: Share) -> bool:
        client = self._client
        waiting = client.status.waiting + client.metrics.tally.total("pending")
        if client.state != "accepting" or waiting > 0:
            return False
        if not self._taken:  # a call that is too large for its part runs alone
            return True
        taken = [sum(column) for column in zip(share, *self._taken, strict=True)]
        counters = client.status.counters
        pages = counters.get("pages_used", 0.0) + counters.get("pages_free", 0.0)
        half = pages / 2 if pages else float("inf")
        most = (self.most, half, limits.MAX_BATCH_PROMPT_TOKENS)
        return all(one <= limit for one, limit in zip(taken, most, strict=True))
