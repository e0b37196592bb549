"""Works on batches: checks their lines, has each answered, keeps the answers, ends them.

All that a restart needs is in the store. A line whose answer is not durable when a server ends is
answered again, with the same bits.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, TypeVar

from tpdet.errors import Refusal
from tpdet.requests.answer.messages import problem_body
from tpdet.requests.body import limits
from tpdet.requests.body.batch_lines import (
    BatchLineError,
    BatchLines,
    BatchRequest,
    Json,
    failed_line,
    line_digest,
    output_digest,
    refused_line,
)
from tpdet.requests.body.problems import (
    RETRYABLE,
    ApiError,
    bad_request,
    from_code,
    internal_error,
)
from tpdet.requests.routes import RECORDED, Route
from tpdet.server.batches.record import Batch, BatchFile, new_id
from tpdet.server.batches.room import BatchRoom
from tpdet.server.batches.store import BOM, AnswerRow, BatchStore, StoreUnavailableError, json_line
from tpdet.server.front.middleware import ClientGone, HttpExchange
from tpdet.server.front.pace import Turns
from tpdet.server.wire.protocol import REFUSALS, new_request_id

RETRY_SECONDS = 1.0
DISK_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_LEAVE_SECONDS = 2.0  # for lines that end: their receipts are written
_MOST_PROBLEMS = 50
_ENDS = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
    "expired": ("batch_expired", "the batch ended before this request was answered"),
}
_log = logging.getLogger("tpdet.server")
Result = TypeVar("Result")
BatchAnswer = Callable[[HttpExchange, Route, str, BatchRoom], Awaitable[bytes]]
"""The body of the whole answer to an owner's call, as the server answers those over HTTP.

Raises ApiError, or ClientGone once the exchange's `gone` resolves.
"""


class Batches:
    """The batches of one server."""

    def __init__(self, store: BatchStore, room: BatchRoom, most_bytes: int) -> None:
        """most_bytes: of all files together; methods of the store are for `use`."""
        self.most_bytes = most_bytes
        self.store, self._room = store, room
        self._disk = ThreadPoolExecutor(1, "batches")
        self._turns = Turns()
        self._running: dict[str, _Running] = {}
        self._answer: BatchAnswer | None = None
        self._closed = False

    async def use(self, work: Callable[..., Result], *values: Any) -> Result:
        """What a method of the store gives, by its one thread.

        Raises ApiError where it fails, and once the store was let go of.
        """
        if self._closed:
            raise from_code(*REFUSALS["draining"])
        try:
            return await self.keep(work, *values)
        except StoreUnavailableError as error:
            _log.error("--batch-dir: %s", error)
            message = "the server's disk does not take or give files now: try again later"
            raise from_code("engine_overloaded", message) from error

    async def keep(self, work: Callable[..., Result], *values: Any) -> Result:
        """As `use`. Raises StoreUnavailableError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._disk, lambda: work(*values))

    @property
    def open_count(self) -> int:
        """How many batches are worked on."""
        return len(self._running)

    async def begin(self, answer: BatchAnswer) -> None:
        """Go on with what an earlier server left."""
        self._answer = answer
        for batch in await self.keep(self.store.open_batches):
            self.add(batch)
        if self._running:
            _log.info("%d batches go on", len(self._running))

    def add(self, batch: Batch) -> None:
        """Work on a batch that the store has; once that was let go of, the next server does."""
        assert self._answer is not None
        if self._closed:
            return
        running = _Running(self, batch, self._answer, self._room, self._turns)
        self._running[batch.id] = running
        running.task.add_done_callback(lambda _: self._running.pop(batch.id, None))

    def now(self, batch: Batch) -> Batch:
        """The batch with what is not stored yet."""
        running = self._running.get(batch.id)
        return batch if running is None else running.batch

    async def cancel(self, batch: Batch) -> Batch:
        """End a batch with the answers that there are. Raises ApiError for one that has ended."""
        running = self._running.get(batch.id)
        if running is None:
            raise ApiError(
                409, f"the batch is {batch.status}: there is nothing to cancel", code="conflict"
            )
        if running.batch.status in ("validating", "in_progress"):
            running.batch.enter("cancelling")
            running.stop()
            await self.use(self.store.save, running.batch)
        return running.batch

    async def close_when(self, ended: Callable[[], bool]) -> None:
        """Let go of everything once no request is taken any more.

        Nobody waits for batches: what is not answered is answered by the next server.
        """
        while not ended():
            await asyncio.sleep(_LOOK_SECONDS)
        self._closed = True
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(Refusal):
            await self.keep(self.store.close)
        self._disk.shutdown(wait=False)


class _Running:
    """One batch that is worked on, by a task."""

    def __init__(
        self, batches: Batches, batch: Batch, answer: BatchAnswer, room: BatchRoom, turns: Turns
    ) -> None:
        self.batch, self._answer, self._room, self._turns = batch, answer, room, turns
        self._keep, self._store = batches.keep, batches.store
        self._stopped = asyncio.Event()
        self._lines: dict[asyncio.Task[None], asyncio.Future[None]] = {}
        self._answered: asyncio.Queue[AnswerRow | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._work())

    def stop(self) -> None:
        """Begin no further line, and end those that run."""
        self._stopped.set()
        self._end_lines()

    def _end_lines(self) -> None:
        for gone in self._lines.values():
            if not gone.done():
                gone.set_result(None)

    async def _work(self) -> None:
        try:
            while True:
                try:
                    await self._go_on()
                    return
                except StoreUnavailableError as error:
                    _log.error("batch %s waits for the disk: %s", self.batch.id, error)
                    await asyncio.sleep(DISK_SECONDS)
        except Exception:
            _log.exception("batch %s failed", self.batch.id)
            problem = {"code": "internal_error", "message": internal_error().message}
            await self._fail([{**problem, "line": None, "param": None}])

    async def _go_on(self) -> None:
        batch = self.batch
        if batch.status == "validating":
            total, problems = await self._checked()
            if problems:
                await self._fail(problems)
                return
            if batch.status == "validating":  # it may have been cancelled meanwhile
                batch.counts = (total, 0, 0)
                batch.enter("in_progress")
                await self._keep(self._store.save, batch)
                _log.info("batch %s: %d requests", batch.id, total)
        if batch.status == "in_progress":
            await self._answer_lines()
        await self._end()

    async def _fail(self, problems: list[Json]) -> None:
        self.batch.problems = tuple(problems)
        await self._end_as("failed")

    async def _end_as(self, status: str, files: Iterable[BatchFile] = ()) -> None:
        """Keep the batch in its last state; it is not in it where that fails."""
        batch, before = self.batch, (self.batch.status, self.batch.times)
        batch.enter(status)
        try:
            await self._keep(self._store.save, batch, [*files])
        except BaseException:
            batch.status, batch.times = before
            raise

    async def _checked(self) -> tuple[int, list[Json]]:
        """How many requests the file has, and what is wrong with its lines."""
        problems: list[Json] = []
        lines, count = BatchLines(self.batch.endpoint), 0
        with await self._keep(self._store.open_content, self.batch.input_file_id) as file:
            async for portion in self._turns.slices(_read(lines, file)):
                for number, request in portion:
                    count += 1
                    if count > limits.MAX_BATCH_REQUESTS:
                        most = f"it is over the {limits.MAX_BATCH_REQUESTS} requests of a batch"
                        remedy = "split the file before it"
                        return count, [_problem(f"{most}: {remedy}", number, None)]
                    if isinstance(request, BatchLineError) and len(problems) < _MOST_PROBLEMS:
                        problems.append(_problem(str(request), number, request.param))
                if self._stopped.is_set():
                    break
        if not count:
            problems.append(_problem("the file has no requests: send a line for each", None, None))
        return count, problems

    # Answers

    async def _answer_lines(self) -> None:
        """Have every line answered that is not, until the batch is stopped or expires."""
        answered = await self._keep(self._store.answered, self.batch.id)
        self._answered = asyncio.Queue()
        self.batch.counts = (self.batch.counts[0], 0, 0)
        self._count(answered.values())
        writer = asyncio.create_task(self._write())
        places = asyncio.Semaphore(self._room.most)
        left = self.batch.expires_at - time.time()
        expiry = asyncio.get_running_loop().call_later(max(0.0, left), self.stop)
        try:
            with await self._keep(self._store.open_content, self.batch.input_file_id) as file:
                for number, request in _read(BatchLines(self.batch.endpoint), file):
                    if number in answered or isinstance(request, BatchLineError):
                        await asyncio.sleep(0)
                        continue
                    await places.acquire()
                    if self._stopped.is_set() or writer.done():
                        break
                    self._start(number, request, places)
            while self._lines and not writer.done():
                waited = {*self._lines, writer}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self._answered.put_nowait(None)
            await writer
        finally:
            expiry.cancel()
            writer.cancel()
            self._end_lines()
            if self._lines:
                await asyncio.wait({*self._lines}, timeout=_LEAVE_SECONDS)
            for task in self._lines:
                task.cancel()

    def _start(self, number: int, request: BatchRequest, places: asyncio.Semaphore) -> None:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._answer_line(number, request, gone))
        self._lines[task] = gone

        def ended(task: "asyncio.Task[None]") -> None:
            del self._lines[task]
            places.release()
            if not task.cancelled() and task.exception() is not None:
                _log.error("a line of batch %s failed", self.batch.id, exc_info=task.exception())

        task.add_done_callback(ended)

    async def _answer_line(
        self, number: int, request: BatchRequest, gone: "asyncio.Future[None]"
    ) -> None:
        name = f"batch_req_{self.batch.id.rpartition('_')[2]}_{number}"
        while not gone.done():
            request_id = new_request_id()
            try:
                body = await self._asked(request, request_id, gone)
            except ClientGone:
                return
            except ApiError as problem:
                if problem.code in RETRYABLE:
                    await asyncio.wait([gone], timeout=RETRY_SECONDS)
                    continue
                refused = json.loads(problem_body(problem, request.url, request_id))
                status = problem.status
                line = refused_line(name, request.custom_id, request_id, status, refused)
                self._answered.put_nowait(AnswerRow(number, request_id, True, json_line(line)))
                return
            if b'"aborted":true' in body:  # by whoever ended all requests: it is asked again
                continue
            names = json_line({"id": name, "custom_id": request.custom_id})[:-1]
            head = b'%b,"response":{"status_code":200,"request_id":"%b","body":'
            head %= names, request_id.encode()
            output = head + body + b'},"error":null}'
            self._answered.put_nowait(AnswerRow(number, request_id, False, output))
            return

    async def _asked(
        self, request: BatchRequest, request_id: str, gone: "asyncio.Future[None]"
    ) -> bytes:
        body = request.seeded_body
        data = json_line(body)
        if len(data) > limits.MAX_BODY_BYTES:
            raise bad_request(f"the body is over {limits.MAX_BODY_BYTES} bytes: send less")
        # Requests of an owner share cached prefixes with each other, and with nobody else.
        salt = f"batches of {self.batch.owner}" if self.batch.owner else ""
        exchange = HttpExchange(request_id, salt, body, data, gone)
        return await self._answer(exchange, RECORDED[request.url], self.batch.owner, self._room)

    async def _write(self) -> None:
        """Keep answers as they come: all that wait, at once."""
        ended = False
        while not ended:
            rows = [await self._answered.get()]
            while not self._answered.empty():
                rows.append(self._answered.get_nowait())
            ended = None in rows
            known = [row for row in rows if row is not None]
            await self._keep(self._store.add_answers, self.batch.id, known)
            self._count(row.failed for row in known)

    def _count(self, failed: Iterable[bool]) -> None:
        total, answered, wrong = self.batch.counts
        for one in failed:
            answered, wrong = answered + (not one), wrong + one
        self.batch.counts = total, answered, wrong

    # The end

    async def _end(self) -> None:
        """Write lines for what was not answered, and make the output files."""
        batch, last = self.batch, "completed"
        total, *rest = batch.counts
        if batch.status == "cancelling":
            last = "cancelled"
        elif batch.status == "in_progress" and (batch.expired or sum(rest) < total):
            last, batch.expired = "expired", True
            await self._keep(self._store.save, batch)  # what follows may be interrupted
        if last != "completed":
            await self._refuse_rest(last)
        elif batch.status == "in_progress":
            batch.enter("finalizing")
            await self._keep(self._store.save, batch)
        answered = await self._keep(self._store.answered, batch.id)
        batch.counts = (max(total, len(answered)), 0, 0)
        self._count(answered.values())
        outputs = [await self._output(failed) for failed in (False, True)]
        good, wrong = outputs
        batch.output_file_id = None if good is None else good.id
        batch.error_file_id = None if wrong is None else wrong.id
        batch.digest = await self._digest()
        await self._end_as(last, [file for file in outputs if file is not None])
        _log.info("batch %s is %s: %d answered, %d failed", batch.id, last, *batch.counts[1:])

    async def _refuse_rest(self, last: str) -> None:
        answered = await self._keep(self._store.answered, self.batch.id)
        code, message = _ENDS[last]
        name = f"batch_req_{self.batch.id.rpartition('_')[2]}"
        with await self._keep(self._store.open_content, self.batch.input_file_id) as file:
            async for portion in self._turns.slices(_read(BatchLines(self.batch.endpoint), file)):
                lines = [
                    (number, failed_line(f"{name}_{number}", request.custom_id, code, message))
                    for number, request in portion
                    if isinstance(request, BatchRequest) and number not in answered
                ]
                rows = [AnswerRow(number, None, True, json_line(line)) for number, line in lines]
                await self._keep(self._store.add_answers, self.batch.id, rows)

    async def _output(self, failed: bool) -> BatchFile | None:
        """The output file of answers or of errors; None without any."""
        size = await self._keep(self._store.output_bytes, self.batch.id, failed)
        if not size:
            return None
        return BatchFile(
            id=new_id("file-"),
            owner=self.batch.owner,
            created=int(time.time()),
            filename=f"{self.batch.id}_{'errors' if failed else 'output'}.jsonl",
            bytes=size,
            batch=self.batch.id,
            failed=failed,
        )

    async def _digest(self) -> str:
        digests: list[bytes] = []
        for failed in (False, True):
            after = -1
            while rows := await self._keep(self._store.rendered, self.batch.id, failed, after):
                after = rows[-1].line
                async for portion in self._turns.slices(_digests(rows)):
                    digests += portion
        return output_digest(digests)


def _digests(rows: list[AnswerRow]) -> Iterator[bytes]:
    return (line_digest(json.loads(row.output)) for row in rows)


def _read(
    lines: BatchLines, file: IO[bytes]
) -> Iterator[tuple[int, BatchRequest | BatchLineError]]:
    """Each line that is not blank with its number: its request, or what is wrong with it."""
    number = 0
    while data := file.readline(limits.MAX_BODY_BYTES + 2):
        number += 1
        line = data.removeprefix(BOM) if number == 1 else data
        while not data.endswith(b"\n") and data:  # the rest of a line that is too long
            data = file.readline(limits.MAX_BODY_BYTES)
        if not line.strip():
            continue
        try:
            yield number, lines.read(number, line.rstrip(b"\r\n"))
        except BatchLineError as error:
            yield number, error


def _problem(message: str, line: int | None, param: str | None) -> Json:
    """An entry of a batch's `errors`."""
    shown = message if line is None else f"line {line}: {message}"
    return {"code": "invalid_line", "message": shown[:500], "line": line, "param": param}
