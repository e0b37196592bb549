"""Tries each JSON schema in a separate process before the engine sees it, a few at a time."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tpdet.errors import RequestError
from tpdet.grammar import trial
from tpdet.server.wire.limits import MAX_WAITING_SCHEMAS
from tpdet.server.wire.problems import from_code, from_request_error

_AT_ONCE = 2


class SchemaTrials:
    """Its threads wait for the processes, so that no other work is held up."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "schema")
        self._count = 0

    async def check(self, schema: str) -> None:
        """Raise ApiError: 400 for a schema that cannot be used, 503 when too many wait."""
        if self._count >= MAX_WAITING_SCHEMAS:
            raise from_code(
                "engine_overloaded", f"{MAX_WAITING_SCHEMAS} schemas wait already: try again"
            )
        self._count += 1
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, trial.check, schema)
        except RequestError as error:
            raise from_request_error(error) from None
        finally:
            self._count -= 1
