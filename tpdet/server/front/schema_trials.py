"""Tries the form of each answer in a separate process before the engine has it, a few at once."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tpdet.grammar import trial
from tpdet.requests.answer_form import AnswerForm
from tpdet.requests.body.limits import MAX_WAITING_SCHEMAS, share_of
from tpdet.requests.body.problems import from_code, request_errors_as_problems

_AT_ONCE = 2


class SchemaTrials:
    """Its threads wait for the processes, so that no other work is held up."""

    def __init__(self, processes: int = 1) -> None:
        """processes: HTTP processes that the server's limits are shared out among."""
        self._threads = ThreadPoolExecutor(share_of(_AT_ONCE, processes), "schema")
        self._most, self._count = share_of(MAX_WAITING_SCHEMAS, processes), 0

    async def check(self, form: AnswerForm) -> None:
        """Raise ApiError: 400 for a form that cannot be used, 503 when too many wait."""
        if self._count >= self._most:
            raise from_code("engine_overloaded", f"{self._most} schemas wait already: try again")
        self._count += 1
        try:
            loop = asyncio.get_running_loop()
            with request_errors_as_problems():
                await loop.run_in_executor(self._threads, trial.check, form)
        finally:
            self._count -= 1
