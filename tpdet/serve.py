"""`python -m tpdet.serve`: the program of every rank, under torchrun, srun or mpirun, or alone.

Rank 0 talks to the HTTP process and plans the steps; the other ranks execute its plans. Settings
are refused before the port opens. A fatal error ends all streams with an error, then all local
ranks.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tpdet.checkpoint.resolve import resolve_tokenizer
from tpdet.config import EngineConfig
from tpdet.errors import PeerLostError
from tpdet.launch.host.interpreter import leave_working_directory, missing_bytecode
from tpdet.launch.host.processes import die_with_parent
from tpdet.launch.life.faults import read_faults
from tpdet.launch.life.garbage import keep_all, no_garbage
from tpdet.launch.life.lifecycle import check_peers, end_process
from tpdet.launch.life.log_lines import open_log
from tpdet.launch.life.run_directory import (
    RunDirectory,
    current_session,
    default_path,
    open_run_directory,
)
from tpdet.launch.life.run_secret import given_secret
from tpdet.launch.life.signals import StopSignals
from tpdet.launch.life.waiting import Waiting
from tpdet.launch.ranks.environment import RankEnvironment, read_environment
from tpdet.launch.ranks.pinned import pin_environment
from tpdet.server.leader.bridge import Bridge
from tpdet.server.leader.canary import Canary
from tpdet.server.leader.control import ControlPlane
from tpdet.server.leader.drain import Drain
from tpdet.server.leader.idle_checks import IdleChecks
from tpdet.server.leader.pause import Pause
from tpdet.server.leader.reload import Reload
from tpdet.server.leader.start import (
    acting_at_start,
    listen_on,
    log_model,
    open_admin_port,
    open_bridge,
    open_port,
    open_store_notes,
    start_facts,
)
from tpdet.server.leader.weight_verbs import WeightSources, WeightVerbs
from tpdet.server.settings.settings import Settings, load_settings
from tpdet.server.settings.sources import forget_settings
from tpdet.text.tokenizer_ahead import TokenizerAhead

if TYPE_CHECKING:
    from tpdet.engine import Engine

BuildEngine = Callable[[Settings, RankEnvironment], "Engine"]
IDLE_POLL_SECONDS = 0.1
BUSY_POLL_SECONDS = 0.001  # while a control call has no answer yet, and nothing else is to be done
_NVIDIA = Path("/dev/nvidiactl")

_log = logging.getLogger("tpdet.server")


def main(arguments: Sequence[str] | None = None, build: BuildEngine | None = None) -> int:
    """Run this rank until the server is drained (0); an error ends the process with its code."""
    rank, run = 0, None
    bridges: list[Bridge] = []
    try:
        settings = load_settings(arguments, "tpdet.serve")
        read_faults(settings.server.allow_faults)
        secret = given_secret(settings.server.run_secret_file)
        environment = read_environment()
        rank = environment.rank
        settings.check_size(environment.size)
        forget_settings()
        # Other ranks log only warnings: they do the same as rank 0.
        open_log(f"rank {rank}", logging.WARNING if rank else logging.INFO)
        pin_environment(environment)
        if environment.launched:
            die_with_parent()
        signals = StopSignals()
        run = _enter_run_directory(settings, environment, signals)
        build = build or partial(build_engine, secret=secret or run.secret())
        if rank == 0:
            _lead(settings, environment, run, signals, build, bridges)
            run.clear_channels()
        else:
            signals.watch(lambda number: _leave_if_peer_lost(run, rank))
            _follow(settings, environment, build)
            if run.owned:  # this rank cleans up on a node where rank 0 does not
                run.clear_channels()
        return 0
    except Exception as error:
        end_process(run, rank, error, partial(_tell_clients, bridges, error))


def build_engine(
    settings: Settings, environment: RankEnvironment, secret: bytes | None = None
) -> "Engine":
    """The engine over the launcher's ranks; `secret` is the run's secret."""
    with no_garbage():  # looking for it would take a sixth of the time of the imports
        from tpdet.comm.device import open_world
        from tpdet.comm.world.exit_reasons import reporting_exit
        from tpdet.engine import Engine
        from tpdet.engine.fault_points import FaultPoints
    config = settings.engine
    tokenizer = _tokenizer_of_schemas(config) if environment.rank == 0 else None
    faults = read_faults(settings.server.allow_faults)
    world = open_world(
        config.device,
        config.step_timeout,
        environment,
        transport=config.transport,
        start_timeout=config.start_timeout,
    )
    points = FaultPoints(faults, environment.rank) if faults else None
    engine = Engine(config, world, secret=secret, faults=points)
    with reporting_exit(world, lambda: "the start"):
        engine.runner.check_poison()
    if tokenizer is not None:
        # Now rather than at the first schema: it takes a second for a large vocabulary.
        engine.grammars.load(tokenizer.result())
    if environment.rank == 0 and (note := missing_bytecode("torch")):
        _log.warning("%s", note)
    keep_all()
    return engine


def _tokenizer_of_schemas(config: EngineConfig) -> TokenizerAhead | None:
    """Begin to load what schemas need, if there may be some."""
    if config.skip_tokenizer_init or not find_spec("llguidance"):
        return None
    directory = resolve_tokenizer(config.tokenizer, config.model, config.revision)
    return TokenizerAhead(directory, config.chat_template)


def _lead(
    settings: Settings,
    environment: RankEnvironment,
    run: RunDirectory,
    signals: StopSignals,
    build: BuildEngine,
    bridges: list[Bridge],
) -> None:
    """Rank 0: start the server, serve until a drain ends, and stop the other ranks."""
    for note in (*settings.notes, *open_store_notes(environment)):
        _log.warning("%s", note)
    with Waiting(), acting_at_start(signals, run, environment):
        _log.info("starting rank 0 of %d for %s", environment.size, settings.engine.model)
        port = open_port(settings.server)
        admin = open_admin_port(settings.server)
        bridge = open_bridge(settings, run, port, signals, admin)
        bridges.append(bridge)
        engine = build(settings, environment)
        if settings.engine.on_slowdown is not None:
            engine.calibrate()
        pulse = Pulse(engine, settings.engine.step_timeout / 4)
        canary = Canary(engine, settings.server.canary_interval)
        canary.learn()
        pulse.note()
        ports = [it for it in (port, admin) if it is not None]
        bridge.open(start_facts(engine, environment), lambda: listen_on(ports), pulse.beat_if_due)

    def ready() -> None:
        urls = {} if admin is None else {"admin_url": admin.url}
        run.write_ready(ready_content(port.url, run, engine, environment) | urls)

    def announce() -> None:
        bridge.announce(start_facts(engine, environment))
        ready()

    ready()
    log_model(settings.served_name, engine, environment)
    _log.info("%s at %s, run directory %s", settings.served_name, port.url, run.path)
    drain = Drain(signals, run, settings.server.drain_timeout)
    idle_checks = IdleChecks(engine, settings.engine.step_timeout / 4)
    reload = Reload(run, engine, bridge, canary, announce)
    control = ControlPlane(engine, bridge, canary, announce)
    sources = WeightSources(settings.server.weights_root, settings.server.senders)
    look = partial(drain.look_from_update, engine)
    verbs = WeightVerbs(engine, control, bridge, canary, sources, look)
    control.add(verbs.handlers)
    serve(engine, bridge, drain, pulse, canary, idle_checks, reload, control)
    if not environment.one_host:
        engine.heartbeat()  # a rank lost on another host means 75, not a drain
    run.decide_exit(0, "drained", 0)
    engine.stop_workers()
    bridge.stop()
    engine.close()
    _log.info("drained and stopped")


def serve(
    engine: "Engine",
    bridge: Bridge,
    drain: Drain,
    pulse: "Pulse",
    canary: Canary,
    idle_checks: IdleChecks,
    reload: Reload,
    control: ControlPlane,
) -> None:
    """Rank 0's loop: receive requests, step, deliver outputs; returns after a complete drain.

    Who asks for a change of state is answered once every HTTP process goes by the new one.
    """

    def report() -> None:
        usable = engine.weights.usable
        bridge.state = state(drain, canary, idle_checks, reload, control.pause, usable)
        if bridge.state != "reloading":
            reload.refuse(f"the server is {bridge.state}")
        elif control.pause.keeps:
            reload.refuse("the server is paused and keeps its requests: resume it first")
        counted = {"canary_mismatches": canary.mismatches, **engine.gauges, **control.gauges}
        bridge.report(engine, unasked=canary.running, **counted)

    while True:
        drain.look(engine)
        reload.look()
        report()
        reload.tell()
        idle = BUSY_POLL_SECONDS if control.busy else IDLE_POLL_SECONDS
        heard = bridge.receive(engine, 0.0 if engine.interventions.may_step else idle)
        if heard or drain.begun:
            canary.abandon()
        elif not reload.begun and not control.pause.mode:
            canary.begin_if_due()
        control.go_on(drain.begun)
        if control.busy:
            report()
            control.tell()
        if reload.go_on():
            bridge.listen_again()
            pulse.note()
        elif engine.interventions.may_step:
            began = time.monotonic()
            outputs = canary.take(engine.step())
            pulse.note()
            control.publish()
            bridge.deliver(outputs, time.monotonic() - began)
        elif drain.begun and not heard and not bridge.has_work(engine):
            control.tell(ending=True)
            reload.tell(ending=True)
            return
        else:
            pulse.beat_if_due()
            idle_checks.check_if_due()
        drain.force_if_overdue(engine)


def state(
    drain: Drain,
    canary: Canary,
    idle_checks: IdleChecks,
    reload: Reload,
    pause: Pause,
    usable: bool = True,
) -> str:
    """The server's state for clients: "accepting", or why it takes no requests.

    usable: whether the weights are whole.
    """
    if drain.begun:
        return "draining"
    if canary.failed and reload.begun:
        return "reloading"
    if not canary.healthy:
        return "unusable" if canary.failed else "untrusted"
    if not idle_checks.sound:
        return "damaged"
    if reload.begun:
        return "reloading"
    if not usable and not pause.keeps:
        return "incomplete"
    return "paused" if pause.refuses else "accepting"


def _follow(settings: Settings, environment: RankEnvironment, build: BuildEngine) -> None:
    """A rank above 0: execute plans until one says to stop."""
    engine = build(settings, environment)
    engine.worker_loop()
    engine.close()


class Pulse:
    """Rank 0's sign of life to idle ranks, every `interval` seconds, so that none times out."""

    def __init__(self, engine: "Engine", interval: float) -> None:
        self._engine, self._interval, self._last = engine, interval, time.monotonic()

    def note(self) -> None:
        """Note that a plan was sent."""
        self._last = time.monotonic()

    def beat_if_due(self) -> None:
        """Send an empty plan if none was sent for `interval` seconds."""
        if time.monotonic() - self._last >= self._interval:
            self._engine.heartbeat()
            self.note()


def ready_content(
    url: str, run: RunDirectory, engine: "Engine", environment: RankEnvironment
) -> dict[str, object]:
    """The content of ready.json."""
    ranks = [
        {"rank": r.rank, "pid": r.pid, "host": r.host, "device": r.device} for r in run.records()
    ]
    return {
        "url": url,
        "ranks": ranks,
        "system_fingerprint": engine.system_fingerprint,
        "vocab_size": engine.model_config.vocab_size,
        "tp": environment.size,
    }


def _enter_run_directory(
    settings: Settings, environment: RankEnvironment, signals: StopSignals
) -> RunDirectory:
    given = settings.server.run_dir
    path = Path(given) if given is not None else default_path(current_session(environment))
    run = open_run_directory(path, environment)
    # A directory that Slurm or a wrapper named stays: a job's script reads exit.json there.
    run.temporary = given is None and not environment.session
    signals.install()
    run.register(environment.rank, _device_name(settings.engine.device, environment))
    return run


def _device_name(device: str, environment: RankEnvironment) -> str:
    """The name of this rank's device in ready.json."""
    if device == "cpu" or (device == "auto" and not _NVIDIA.exists()):
        return "cpu"  # known without torch, which takes seconds to import
    with no_garbage():
        from tpdet.comm.device import resolve_device
    return f"cuda:{environment.local_rank}" if resolve_device(device) == "cuda" else "cpu"


def _tell_clients(bridges: list[Bridge], error: BaseException) -> None:
    for bridge in bridges:
        bridge.die(error)


def _leave_if_peer_lost(run: RunDirectory, rank: int) -> None:
    try:
        check_peers(run, rank)
    except PeerLostError as error:
        end_process(run, rank, error)


if __name__ == "__main__":
    leave_working_directory()
    sys.exit(main())
