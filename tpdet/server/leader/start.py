"""Starts the HTTP process from rank 0: the port first, so that a taken one is refused early."""

import itertools
import logging
import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tpdet.checkpoint.model_config.expert_load import route_shape
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.launch.host.listeners import listeners
from tpdet.launch.life.lifecycle import end_start
from tpdet.launch.life.run_directory import RunDirectory
from tpdet.launch.life.run_secret import new_secret
from tpdet.launch.life.signals import StopSignals
from tpdet.launch.ranks.environment import RankEnvironment
from tpdet.requests.engine_facts import EngineFacts
from tpdet.server.front.tally import new_tallies
from tpdet.server.leader import http_child
from tpdet.server.leader.bridge import Bridge, EngineSocket, HttpLink
from tpdet.server.leader.http_child import HttpProcess
from tpdet.server.settings.keys import read_key_file
from tpdet.server.settings.settings import ServerConfig, Settings
from tpdet.server.wire.process_config import AuditConfig, BatchConfig, ProcessConfig
from tpdet.server.wire.protocol import socket_path

if TYPE_CHECKING:
    import torch

    from tpdet.engine import Engine


_log = logging.getLogger("tpdet.server")


@dataclass(frozen=True)
class Port:
    """A port that is ours and closed until `listen`."""

    listener: socket.socket
    url: str
    flag: str = "--port"

    def listen(self) -> None:
        """Open it. Raises ResourceError if another server was faster."""
        http_child.listen(self.listener, self.flag)


def acting_at_start(
    signals: StopSignals, run: RunDirectory, environment: RankEnvironment
) -> AbstractContextManager[None]:
    """A stop signal ends rank 0's start at once while inside, even where it waits for a file.

    Ranks of other hosts would take that for a loss: with those the start goes on, and drains.
    """
    if not environment.one_host:
        return nullcontext()
    return signals.acting(lambda: end_start(run))


def open_store_notes(environment: RankEnvironment) -> list[str]:
    """What to say where torchrun's agent, which started this rank, listens on every address."""
    if environment.launcher != "torchrun":
        return []
    ports = sorted({found.port for found in listeners(os.getppid()) if found.everywhere})
    if not ports:
        return []
    return [
        f"torchrun listens on every address (port {', '.join(map(str, ports))}) and asks for "
        "no password: by its c10d rendezvous whoever reaches it runs code as this user. tpdet "
        "serve opens no such port, static rendezvous (--master-addr, --master-port) unpickles "
        "nothing (docs/cluster.md)"
    ]


def open_port(config: ServerConfig) -> Port:
    """Take the port. Raises ResourceError if it is taken."""
    listener = http_child.bind_port(config.host, config.port)
    return Port(listener, http_child.url_of(listener))


def listen_on(ports: Sequence[Port]) -> None:
    """Open the ports. Raises ResourceError if another server was faster."""
    for port in ports:
        port.listen()


def open_admin_port(config: ServerConfig) -> Port | None:
    """Take the port of the admin listener, if there is to be one. Raises as `open_port`."""
    if config.admin_address is None:
        return None
    listener = http_child.bind_port(*config.admin_address, "--admin-listen")
    port = Port(listener, http_child.url_of(listener), "--admin-listen")
    asks = "asks for the admin key" if config.admin_asks else "asks for no key"
    _log.warning(
        "the admin listener %s has data and control routes and %s: it bypasses the API keys",
        port.url,
        asks,
    )
    return port


def open_bridge(
    settings: Settings,
    run: RunDirectory,
    port: Port,
    signals: StopSignals,
    admin: Port | None = None,
) -> Bridge:
    """Start the HTTP processes while weights load. Raises ResourceError and UsageError."""
    count = settings.server.http_processes
    tallies = new_tallies(count)
    admin_keys = settings.server.admin_key_file
    common = ProcessConfig(
        parent_pid=os.getpid(),
        socket=port.listener.fileno(),
        tallies=tallies,
        index=0,
        processes=count,
        run_dir=str(run.path),
        session=run.session,
        engine_address="",
        channel_key="",
        tokenizer_directory=_tokenizer_directory(settings),
        chat_template=settings.engine.chat_template,
        chat_template_date=settings.engine.chat_template_date,
        served_name=settings.served_name,
        max_queue=settings.engine.max_queue,
        step_timeout=settings.engine.step_timeout,
        created=int(time.time()),
        key_digests=_key_digests(settings),
        admin_digests=() if admin_keys is None else read_key_file(admin_keys, "--admin-key-file"),
        admin_socket=-1 if admin is None else admin.listener.fileno(),
        admin_host=""
        if settings.server.admin_address is None
        else settings.server.admin_address[0],
        admin_asks=settings.server.admin_asks,
        log_access=not settings.server.disable_uvicorn_access_log,
        log_statistics=not settings.server.disable_log_stats,
        batch_swing_alarm=settings.batch_swing_alarm,
        reasoning_parser=settings.server.reasoning_parser,
        tool_call_parser=settings.server.tool_call_parser,
        weight_senders=bool(settings.server.senders),
        answer_cache=settings.server.answer_cache,
        answer_cache_bytes=settings.server.answer_cache_bytes,
    )
    links: list[HttpLink] = []
    batches = _batches(settings, str(run.path))
    with _audits(settings.server) as audits, batches as of_processes:
        for index, (audit, files) in enumerate(zip(audits, of_processes, strict=True)):
            key = new_secret()
            end = EngineSocket(str(run.path), key, index)
            named = {"index": index, "engine_address": end.address, "channel_key": key.hex()}
            own = msgspec.structs.replace(common, **named, audit=audit, batches=files)
            links.append(HttpLink(end, HttpProcess(own)))
    os.close(tallies)
    return Bridge(links, settings.engine.step_timeout, signals.fileno())


def start_facts(engine: "Engine", environment: RankEnvironment) -> EngineFacts:
    """The facts of the engine that the HTTP process needs."""
    return EngineFacts(
        system_fingerprint=engine.system_fingerprint,
        contract=engine.arithmetic.contract,
        model_digest=engine.runner.model_digest,
        max_model_len=engine.max_model_len,
        vocab_size=engine.model_config.vocab_size,
        eos_token_ids=tuple(engine.model_config.eos_token_ids),
        tp=environment.size,
        approximate_fingerprint=engine.runner.fingerprint(approximate=True),
        dtype=engine.model_config.dtype,
        weights_number=engine.versions.number,
        weight_version=engine.versions.version,
        logprobs_mode=engine.config.logprobs_mode,
        seed_policy=engine.config.seed_policy,
        experts_shape=route_shape(engine.model_config),
        device=_device_name(engine.runner.device),
        pooling=None if engine.pooler is None else engine.pooler.pooling,
        pooling_digest="" if engine.pooler is None else engine.pooler.digest,
    )


def _key_digests(settings: Settings) -> tuple[str, ...]:
    """The digests of the keys that are accepted; none where everything is open."""
    if settings.api_key_digest is not None:
        return (settings.api_key_digest,)
    path = settings.server.api_key_file
    return read_key_file(path) if path is not None else ()


@contextmanager
def _audits(config: ServerConfig) -> Iterator[list[AuditConfig | None]]:
    """Where the receipts of each HTTP process go; None for none.

    The first one writes all of them. It has a socket from each other one, which is theirs alone
    once this process has closed its own ends.
    """
    if config.audit_dir is None or config.audit_key is None:
        yield [None] * config.http_processes
        return
    first = AuditConfig(config.audit_dir, config.audit_key, config.audit_policy == "required")
    pairs = [socket.socketpair() for _ in range(config.http_processes - 1)]
    others = tuple(here.fileno() for here, _ in pairs)
    try:
        yield [
            msgspec.structs.replace(first, others=others),
            *(msgspec.structs.replace(first, writer=there.fileno()) for _, there in pairs),
        ]
    finally:
        for end in itertools.chain(*pairs):
            end.close()


@contextmanager
def _batches(settings: Settings, run_dir: str) -> Iterator[list[BatchConfig | None]]:
    """Where each HTTP process has files and batches, if any: the first here, others there."""
    server, engine = settings.server, settings.engine
    if server.batch_dir is None:
        yield [None] * server.http_processes
        return
    seats = engine.fixed_batch or engine.max_num_seqs
    config = BatchConfig(server.batch_dir, server.batch_dir_bytes, seats)
    if server.http_processes == 1:
        yield [config]
        return
    path = socket_path(run_dir, "http.sock")
    with http_child.listening_file(path) as listener:
        other = msgspec.structs.replace(config, address=path)
        first = msgspec.structs.replace(other, socket=listener.fileno())
        yield [first, *[other] * (server.http_processes - 1)]


def _device_name(device: "torch.device") -> str:
    """What rank 0 computes on, as its maker or its system calls it."""
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    import torch

    return str(torch.cuda.get_device_name(device))


def log_model(name: str, engine: "Engine", environment: RankEnvironment) -> None:
    """What is served: by which names an operator finds it in receipts, and how much fits."""
    runner = engine.runner
    _log.info(
        "%s: dtype %s, tensor-parallel size %d, device %s, context %d, %d KV pages (%d tokens), "
        "contract %s, fingerprint %s",
        name,
        engine.model_config.dtype,
        environment.size,
        runner.device.type,
        engine.max_model_len,
        runner.num_pages,
        runner.num_pages * PAGE_TOKENS,
        engine.arithmetic.contract,
        engine.system_fingerprint,
    )
    if runner.state_room is not None:
        sizes = runner.loaded.state_bytes
        _log.info(
            "states of linear attention: %d slots of %.1f MiB a rank, %d snapshots of %.1f MiB",
            runner.state_room.running,
            sizes["sequence"] / 2**20,
            runner.state_room.snapshots,
            sizes["snapshot"] / 2**20,
        )


def _tokenizer_directory(settings: Settings) -> str | None:
    """Where the tokenizer is; downloaded here, in the one process that may take its time."""
    if settings.engine.skip_tokenizer_init:
        return None
    from tpdet.checkpoint.resolve import resolve_tokenizer

    engine = settings.engine
    return str(resolve_tokenizer(engine.tokenizer, engine.model, engine.revision))
