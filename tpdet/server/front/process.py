"""The HTTP process: `python -m tpdet.server.front.process`, started by rank 0 and by nothing else.

It tokenises, checks, streams; the engine never waits for it. Stop signals are rank 0's business
and ignored here. When rank 0 dies the kernel sends SIGUSR1 (and standard input closes): every open
answer then ends with an error, and the process with 75 within two seconds.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import uvicorn
import uvloop

from tpdet.errors import PeerLostError, TpdetError
from tpdet.launch.host.processes import die_with_parent
from tpdet.launch.life.garbage import keep_all
from tpdet.launch.life.lifecycle import write_error
from tpdet.launch.life.run_directory import RunDirectory
from tpdet.launch.life.signals import STOP_SIGNALS
from tpdet.requests.body.limits import share_of
from tpdet.server.answers.cache import AnswerCache
from tpdet.server.answers.files import AnswerFiles
from tpdet.server.batches.room import BatchRoom
from tpdet.server.batches.runner import Batches
from tpdet.server.batches.store import BatchStore
from tpdet.server.front.acceptor import Acceptor
from tpdet.server.front.app import Services, batch_answers, make_app
from tpdet.server.front.door import AdminDoor, Door, InnerDoor
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.large_bodies import LargeBodies
from tpdet.server.front.load_lines import BatchSwing, StatisticsLine, log_every
from tpdet.server.front.log import log_loop_problem, open_log
from tpdet.server.front.memory import give_back, limit_arenas
from tpdet.server.front.metrics import Metrics
from tpdet.server.front.middleware import RequestMiddleware
from tpdet.server.front.receipts import Receipts
from tpdet.server.front.schema_trials import SchemaTrials
from tpdet.server.front.tally import SharedTally
from tpdet.server.http1.held_bytes import HeldBytes
from tpdet.server.http1.protocol import GuardedProtocol
from tpdet.server.settings.keys import KeyRing
from tpdet.server.wire.load_bounds import bounded_load
from tpdet.server.wire.process_config import ProcessConfig
from tpdet.text.parsing.calls import CallParser
from tpdet.text.parsing.reasoning import ReasoningParser
from tpdet.text.tokenizer import Tokenizer, TokenizerFiles, read_files

PARENT_DEATH_SIGNAL = signal.SIGUSR1
LOST = 75
# Past the step timeout by what a status message may be late.
PROGRESS_SLACK = 5.0
# What answers get to reach their readers: after the engine died, and after a drain.
DEATH_FLUSH_SECONDS = 1.0
STOP_FLUSH_SECONDS = 5.0
LAST_RESORT_SECONDS = 2.5
LOG_FLUSH_SECONDS = 0.2
WATCH_SECONDS = 0.5

_log = logging.getLogger("tpdet.server")


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: it would refuse connections at a drain's beginning.

    Of several processes each accepts about as many connections as another.
    """

    def __init__(self, config: uvicorn.Config, tally: SharedTally, processes: int) -> None:
        super().__init__(config)
        self._tally, self._alone = tally, processes == 1
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on the sockets."""
        if self._alone:
            await super().startup(sockets)
            return
        await super().startup([])
        self._acceptors = [Acceptor(one, self._protocol, self._tally) for one in sockets or []]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and wait for the answers."""
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        return GuardedProtocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals as they are."""
        yield


def main() -> NoReturn:
    """Run until the engine says stop (0), dies (75), or this process cannot start."""
    limit_arenas()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(LOST)  # rank 0 ended before it sent the configuration
    config = msgspec.json.decode(line, type=ProcessConfig)
    try:
        _run(config)
    except TpdetError as error:
        _refuse(config, error)


def _run(config: ProcessConfig) -> NoReturn:
    die_with_parent(PARENT_DEATH_SIGNAL, expected_parent=config.parent_pid)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    log = open_log(config.log_access, config.index)
    threading.Thread(target=_follow_parent, name="parent", daemon=True).start()
    files = _read_tokenizer(config)
    with bounded_load():
        tokenizer = None if files is None else Tokenizer.from_files(files, counted=True)
        if tokenizer is not None:
            tokenizer.prepare_chats()
            if config.index == 0 and tokenizer.chat_template and tokenizer.chat_template.lacks_date:
                _log.warning(
                    "the chat template prints the date: a chat is refused without "
                    "chat_template_kwargs.current_date, unless --chat-template-date is given"
                )
    reasoning = ReasoningParser.of(config.reasoning_parser, tokenizer)
    if config.index == 0 and config.reasoning_parser == "auto":
        _log.info("reasoning parser: %s", reasoning.name if reasoning else "off")
    calls = CallParser.of(config.tool_call_parser, tokenizer)
    if config.index == 0 and config.tool_call_parser == "auto":
        _log.info("parser of calls of tools: %s", calls.family.name if calls else "off")
    keep_all()
    tally = SharedTally(config.tallies, config.index)
    receipts = None if config.audit is None else Receipts(config.audit, files, tally)
    serving = _serve(config, files, tokenizer, reasoning, calls, tally, receipts)
    code = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(serving)
    if code == LOST:
        _clear_channels(config)
    log.finish(LOG_FLUSH_SECONDS)
    # At once: closing the runner would wait for threads that still tokenise.
    os._exit(code)


def _follow_parent() -> None:
    """A last resort beside the signal: end soon after rank 0 has, whatever the event loop does."""
    while os.read(0, 4096):  # not by sys.stdin, whose lock would be held when the process ends
        pass
    time.sleep(LAST_RESORT_SECONDS)
    os._exit(LOST)


def _refuse(config: ProcessConfig, error: TpdetError) -> NoReturn:
    """End before serving: rank 0 ends with this code, and prints this message."""
    run = RunDirectory(Path(config.run_dir), config.session)
    known = isinstance(error, PeerLostError)  # rank 0 is gone and needs no report
    decided = known or run.decide_exit(error.exit_code, error.code, 0, str(error))
    if not decided and config.index == 0:
        write_error(f"{error}\n")
    os._exit(error.exit_code)


def _clear_channels(config: ProcessConfig) -> None:
    """Remove what a killed rank 0 left, unless the directory is another server's by now."""
    run = RunDirectory(Path(config.run_dir), config.session)
    if run.current:
        run.clear_channels()


def _read_tokenizer(config: ProcessConfig) -> TokenizerFiles | None:
    if config.tokenizer_directory is None:
        return None
    return read_files(
        Path(config.tokenizer_directory), config.chat_template, config.chat_template_date
    )


async def _serve(
    config: ProcessConfig,
    files: TokenizerFiles | None,
    tokenizer: Tokenizer | None,
    reasoning: ReasoningParser | None,
    calls: CallParser | None,
    tally: SharedTally,
    receipts: Receipts | None,
) -> int:
    metrics = Metrics(config.served_name, lambda: client.status, tally)
    client = EngineClient(
        config.engine_address, bytes.fromhex(config.channel_key), metrics, config.max_queue
    )
    asyncio.get_running_loop().set_exception_handler(log_loop_problem)
    asyncio.get_running_loop().add_signal_handler(
        PARENT_DEATH_SIGNAL, lambda: client.die("engine_dead", "the engine process has ended")
    )
    services = Services(
        client=client,
        tokenizer=tokenizer,
        large_bodies=LargeBodies(files, config.processes),
        schema_trials=SchemaTrials(config.processes),
        served_name=config.served_name,
        progress_timeout=config.step_timeout + PROGRESS_SLACK,
        created=config.created,
        guarded=bool(config.key_digests),
        reasoning=reasoning,
        calls=calls,
        weight_senders=config.weight_senders,
        receipts=receipts,
        answers=_answer_cache(config, client, tokenizer),
        batches=_batches(config, client),
    )
    servers = _make_servers(config, services)
    receiving = asyncio.create_task(client.receive())
    client.say_hello()
    try:
        await _first(client.started, client.stopped)
        if not client.stopped.is_set():
            await _accept_until_stopped(config, services, servers)
        if client.dead is not None and client.found_hung and os.getppid() == config.parent_pid:
            # In a server of one rank no other rank sees that it hangs.
            os.kill(config.parent_pid, signal.SIGKILL)
        return LOST if client.dead is not None else 0
    finally:
        receiving.cancel()
        client.shut()
        if receipts is not None:
            await asyncio.to_thread(receipts.close)


def _answer_cache(
    config: ProcessConfig, client: EngineClient, tokenizer: Tokenizer | None
) -> AnswerCache | None:
    """The cache of answers, counted by the first process. Raises NotPermittedError."""
    if config.answer_cache is None:
        return None
    directory, limit = Path(config.answer_cache), config.answer_cache_bytes
    files = AnswerFiles(directory, limit, client.metrics.tally)
    if config.index == 0:
        files.tidy(unfinished=True)
    return AnswerCache(files, client, tokenizer)


def _batches(config: ProcessConfig, client: EngineClient) -> Batches | str | None:
    """Files and batches, or where they are asked for. Raises what `BatchStore` raises."""
    if config.batches is None:
        return None
    if config.batches.elsewhere:
        return config.batches.address
    store = BatchStore(Path(config.batches.directory))
    room = BatchRoom(client, config.batches.seats)
    return Batches(store, room, config.batches.most_bytes)


async def _close(batches: Batches | str | None, ended: Callable[[], bool]) -> None:
    if isinstance(batches, Batches):
        await batches.close_when(ended)


def _make_servers(config: ProcessConfig, services: Services) -> dict[int, HttpServer]:
    """The server behind each of the inherited sockets."""
    admin_keys = KeyRing(config.admin_digests)
    control = admin_keys if config.admin_digests else None
    doors = {config.socket: Door(KeyRing(config.key_digests), control)}
    if config.admin_socket >= 0:
        keys = admin_keys if config.admin_asks else KeyRing(())
        doors[config.admin_socket] = AdminDoor(keys, config.admin_host)
    if config.batches is not None and config.batches.socket >= 0:
        doors[config.batches.socket] = InnerDoor()
    _set_up_connections(config, services)
    return {fd: _make_server(config, services, door) for fd, door in doors.items()}


def _set_up_connections(config: ProcessConfig, services: Services) -> None:
    """What connections have in common, through whichever door they came."""
    GuardedProtocol.header_timeout = config.header_timeout
    # The middleware's own timer answers 408 first.
    GuardedProtocol.body_timeout = config.body_timeout + 1.0
    GuardedProtocol.slow_reader_timeout = config.slow_reader_timeout
    tally = services.client.metrics.tally
    GuardedProtocol.count = staticmethod(partial(tally.add, "connections"))
    GuardedProtocol.held = HeldBytes(share_of(config.held_bytes, config.processes))


def _make_server(config: ProcessConfig, services: Services, door: Door) -> HttpServer:
    app = make_app(services, door.has_control)
    middleware = RequestMiddleware(
        app, app.routes, door, config.body_timeout, services.client.metrics.rejected, config.index
    )
    return HttpServer(
        uvicorn.Config(
            middleware,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(config.keep_alive_timeout),
        ),
        services.client.metrics.tally,
        config.processes,
    )


async def _accept_until_stopped(
    config: ProcessConfig, services: Services, servers: dict[int, HttpServer]
) -> None:
    serving, client, batches = [], services.client, services.batches
    if isinstance(batches, Batches):
        await batches.begin(batch_answers(services))
    for fd, server in servers.items():
        task = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=fd)]))
        serving.append(task)
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        if task.done():
            await task
    client.say_serving()
    tasks = [
        asyncio.create_task(client.ping()),
        asyncio.create_task(give_back()),
        asyncio.create_task(_watch_engine(client, config.step_timeout + PROGRESS_SLACK)),
    ]
    if config.index == 0:
        tasks += _watch_load(config, client)
    ends = ("draining", "untrusted", "damaged", "dead")
    closing = asyncio.create_task(_close(batches, lambda: client.state in ends))
    await client.stopped.wait()
    await closing
    for task in tasks:
        task.cancel()
    flush = STOP_FLUSH_SECONDS if client.dead is None else DEATH_FLUSH_SECONDS
    for server in servers.values():
        server.config.timeout_graceful_shutdown = int(flush)
        server.should_exit = True
    with contextlib.suppress(asyncio.CancelledError, TimeoutError):
        await asyncio.wait_for(asyncio.gather(*serving), flush + 0.5)


def _watch_load(config: ProcessConfig, client: EngineClient) -> list[asyncio.Task[None]]:
    """What one process does for all: the line of statistics, the alarm on the batch size."""
    swing = BatchSwing(client.metrics, lambda: client.status, config.batch_swing_alarm)
    lines = [(logging.WARNING, swing.line)]
    if config.log_statistics:
        lines.append((logging.INFO, StatisticsLine(client.metrics, lambda: client.status).line))
    seconds = config.statistics_seconds
    return [asyncio.create_task(log_every(seconds, *line)) for line in lines]


async def _watch_engine(client: EngineClient, patience: float) -> None:
    """End every stream when the engine hangs: silent for `patience` seconds with requests open.

    Looks twice, so that this process, when it was held up itself, hears the engine first.
    """
    suspicious = False
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        hung = client.hung(patience)
        if hung and suspicious:
            break
        suspicious = hung
    logging.getLogger("tpdet.server").error(
        "the engine has been silent for %g s with requests open: raise --step-timeout if a step "
        "takes that long",
        patience,
    )
    client.found_hung = True
    client.die("engine_dead", "the engine makes no progress")


async def _first(*events: asyncio.Event) -> None:
    """Return when any of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


if __name__ == "__main__":
    main()
