"""A few processes that work on large request bodies; further bodies wait for a free one.

No small request, nor /health, waits for a text of megabytes.
"""

import asyncio
import logging
import os
from asyncio.subprocess import PIPE, Process
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tpdet.launch.host.interpreter import python_command, python_environment
from tpdet.requests.body import limits
from tpdet.requests.body.limits import MAX_WAITING_LARGE_BODIES, share_of
from tpdet.requests.body.pooling.pooling_body import PooledCall, repeated_characters
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.problems import from_code, internal_error
from tpdet.requests.body.work import work_on
from tpdet.requests.routes import POOLED, Route
from tpdet.server.body.job import LENGTH, Job, Reply, WorkerStart, frame, too_costly
from tpdet.server.front.middleware import ClientGone, HttpExchange
from tpdet.text.template_meter import BeyondCount
from tpdet.text.tokenizer import TokenizerFiles

if TYPE_CHECKING:
    from tpdet.server.front.app import Services

_AT_ONCE = 2
# On a machine that has other things to do, a job may take several times its processor time.
_WALL_FACTOR = 5.0
_IDLE_SECONDS = 60.0  # an idle worker ends, since it holds a tokenizer

_log = logging.getLogger("tpdet.server")


class _Ended(Exception):
    """A signal ended a worker: its bounds, or the library that it called."""


class _Worker:
    """One process; started for its first job, ended after a while without any."""

    def __init__(self, tokenizer: TokenizerFiles | None) -> None:
        self._tokenizer = tokenizer
        self._process: Process | None = None
        self._retirement: asyncio.TimerHandle | None = None

    async def do(self, job: bytes, body: bytes) -> bytes:
        """The reply's frame; kills the process if cancelled.

        Raises _Ended if a limit ended it, ApiError if it ended itself.
        """
        if self._retirement is not None:
            self._retirement.cancel()
        if self._process is None or self._process.returncode is not None:
            self._process = await self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            for part in (job, body):
                process.stdin.write(LENGTH.pack(len(part)))
                process.stdin.write(part)
            await process.stdin.drain()
            (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
            reply = await process.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.end()
            code = await process.wait()
            _log.warning("a body worker ended with %d", code)
            raise (_Ended() if code < 0 else internal_error()) from None
        except BaseException:  # cancelled: no client waits for its work
            self.end()
            raise
        self._retirement = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self.end)
        return reply

    def end(self) -> None:
        """Kill the process, if there is one; the event loop collects it."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *python_command("-m", "tpdet.server.body.worker"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=python_environment(),
        )
        assert process.stdin is not None
        start = WorkerStart(os.getpid(), self._tokenizer)
        process.stdin.write(frame(msgspec.msgpack.encode(start)))
        return process


class LargeBodies:
    """The workers and the queue before them."""

    def __init__(self, tokenizer: TokenizerFiles | None, processes: int = 1) -> None:
        """processes: HTTP processes that the server's limits are shared out among."""
        at_once = share_of(_AT_ONCE, processes)
        self._idle = [_Worker(tokenizer) for _ in range(at_once)]
        self._seats = asyncio.Semaphore(at_once)
        self._most, self._count = at_once + share_of(MAX_WAITING_LARGE_BODIES, processes), 0

    async def work(
        self, job: Job, body: bytes, gone: "asyncio.Future[None]"
    ) -> Call | PooledCall | bytes:
        """The call that `body` becomes, or the answer as JSON.

        Raises ApiError: what the body is refused for, 503 `engine_overloaded` when too many wait,
        400 when it takes too long or too much memory. Raises ClientGone once `gone` resolves.
        """
        if self._count >= self._most:
            raise from_code(
                "engine_overloaded", f"{self._count} large requests wait already: try again"
            )
        self._count += 1
        task = asyncio.ensure_future(self._in_turn(job, body))
        try:
            waited: set[asyncio.Future[Any]] = {task, gone}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return await msgspec.msgpack.decode(task.result(), type=Reply).outcome()
        except (TimeoutError, _Ended):
            raise too_costly(job.cpu_seconds) from None
        finally:
            task.cancel()
            self._count -= 1

    async def _in_turn(self, job: Job, body: bytes) -> bytes:
        async with self._seats:
            worker = self._idle.pop()
            try:
                async with asyncio.timeout(_WALL_FACTOR * job.cpu_seconds):
                    return await worker.do(msgspec.msgpack.encode(job), body)
            finally:
                self._idle.append(worker)


async def worked_on(
    services: "Services", exchange: HttpExchange, route: Route
) -> Call | PooledCall | bytes:
    """Work on the body, here, in a thread, or in another process, by its size.

    A chat template that does more than a little work goes on in the other process too. A query of
    many documents counts with each of them. Raises as `LargeBodies.work`.
    """
    preparer = replace(services.preparer, tenant_salt=exchange.tenant_salt)
    job = Job(
        route, exchange.request_id, services.served_name, exchange.tenant_salt, preparer.facts
    )
    size = len(exchange.data)
    if size <= limits.LARGE_BODY_BYTES and route in POOLED:
        size += repeated_characters(exchange.body)
    if size > limits.LARGE_BODY_BYTES:
        return await services.large_bodies.work(job, exchange.data, exchange.gone)
    work = partial(work_on, route, preparer, exchange.body, exchange.request_id)
    try:
        return work() if size <= limits.THREAD_BODY_BYTES else await asyncio.to_thread(work)
    except BeyondCount:
        job = msgspec.structs.replace(job, cpu_seconds=limits.TEMPLATE_CPU_SECONDS)
        return await services.large_bodies.work(job, exchange.data, exchange.gone)
