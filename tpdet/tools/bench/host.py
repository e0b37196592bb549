"""`tpdet bench host`: rank 0's processor time in a decode step, through each door, part by part.

A door is `LLM.generate` or the server's loop (engine, canary, the messages to the HTTP process).
On the CPU the model is not run: plans are made, sent, checked and packed as for a GPU's graphs, and
the tokens are fixed ones. So the figures show the host's path alone, without a GPU.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import torch
import zmq

from tpdet.control.plan import StepPlan
from tpdet.engine import Engine
from tpdet.errors import UsageError
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.llm import LLM
from tpdet.requests.request import SamplingParams
from tpdet.runner.graphs.captured_steps import GraphSource
from tpdet.runner.graphs.decode_graphs import DecodeGraphs, decode_shapes
from tpdet.runner.graphs.engine_graphs import Graphs
from tpdet.runner.graphs.graph_room import Graph, GraphRoom
from tpdet.runner.step.shared_rows import RowSharing, SampleTogether
from tpdet.sampling.sampler import PendingSample
from tpdet.server.leader.bridge import Bridge, EngineSocket, HttpLink
from tpdet.server.leader.canary import Canary
from tpdet.server.leader.http_child import HttpProcess
from tpdet.server.wire import protocol
from tpdet.tools.bench.engine import engine_row
from tpdet.tools.bench.load import prompt, submit
from tpdet.tools.bench.run import run_worlds
from tpdet.tools.bench.spec import BenchResult, HostSpec, result_of
from tpdet.tools.measurement.rows import BenchRow, finish
from tpdet.tools.worlds.lists import parse_sizes

_WARM_UP_STEPS = 3
_LOGPROB = -1.5  # of every token where no model runs
_CONNECT_SECONDS = 10.0
_PARTS = (
    ("plan", "scheduler", "schedule_ahead"),
    ("send", "control", "send_plan"),
    ("launch", "runner", "launch"),
    ("wait", "runner", "wait"),
    ("commit", "scheduler", "commit"),
)
"""A step's parts: of the engine's `scheduler`, `control` and `runner`, the method that is timed."""


def host_command(options: argparse.Namespace) -> int:
    """Rank 0's processor time in a decode step, a world a size."""
    spec = msgspec.convert(vars(options), HostSpec)
    rows, largest = run_worlds(parse_sizes(options.tp), spec)
    return finish("host", largest.machine, rows, options.output, as_json=options.json)


class _Meter:
    """Processor time of this thread from one full step's end to the next, and its parts'."""

    def __init__(self, engine: Engine, batch: int) -> None:
        """batch: tokens of a full step."""
        self._spent = {part: 0.0 for part, _, _ in _PARTS} | {"step": 0.0}
        self._marks: list[dict[str, float]] = []
        for part, owner, method in _PARTS:
            self._time(getattr(engine, owner), method, part)
        self._time(engine, "step", "step")
        step = engine.step

        def marked() -> Any:
            outputs = step()
            if len(outputs) == batch:
                now = {"all": time.thread_time(), "wall": time.perf_counter()}
                self._marks.append(self._spent | now)
            return outputs

        vars(engine)["step"] = marked

    def take(self) -> dict[str, float]:
        """Median seconds a step of each part since the last call; "wall" is the clock's."""
        marks, self._marks = self._marks[_WARM_UP_STEPS:-1], []
        if len(marks) < 3:
            raise UsageError(f"{len(marks)} full steps are too few to time: ask for more --steps")
        seconds = {
            part: statistics.median(after[part] - before[part] for before, after in pairwise(marks))
            for part in marks[0]
        }
        inner = sum(seconds[part] for part, _, _ in _PARTS)
        seconds["results"] = seconds.pop("step") - inner
        seconds["readers"] = seconds["all"] - inner - seconds["results"]
        return seconds

    def _time(self, owner: object, method: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self._spent[part] += time.thread_time() - began

        vars(owner)[method] = timed


def measure(spec: HostSpec) -> BenchResult | None:
    """One rank; the result on rank 0."""
    llm = LLM(
        spec.model,
        tensor_parallel_size=None,
        load_format=spec.load_format,  # type: ignore[arg-type]
        device=spec.device,  # type: ignore[arg-type]
        max_model_len=spec.tokens + spec.context,
        max_num_seqs=spec.batch,
        drafts="off",
    )
    engine = llm.engine
    if engine.runner.device.type == "cpu":
        plan_only(engine)
    meter = _Meter(engine, spec.batch)
    vocabulary = engine.model_config.vocab_size
    prompts = [prompt(spec.context, vocabulary, seed) for seed in range(spec.batch)]
    params = SamplingParams(
        temperature=spec.temperature, top_p=spec.top_p, max_tokens=spec.tokens, ignore_eos=True
    )
    llm.generate(list(map(list, prompts)), params, use_tqdm=False)
    result = None
    cases = [("LLM.generate", meter.take() if engine.world.rank == 0 else {})]
    if engine.world.rank == 0:
        _run_loop(engine, prompts, spec)
        cases.append(("server loop", meter.take()))
        engine.stop_workers()
        rows = [row for door, parts in cases for row in _rows(engine, spec, door, parts)]
        result = result_of(rows, spec.device, engine.world.size)
    else:
        engine.worker_loop()
    llm.close()
    return result


def _rows(engine: Engine, spec: HostSpec, door: str, seconds: dict[str, float]) -> list[BenchRow]:
    """A row of a step, of rank 0's thread, and of each part in microseconds a sequence."""
    wall, whole = seconds.pop("wall"), seconds.pop("all")
    parts = {part: round(value * 1e6 / spec.batch, 3) for part, value in seconds.items()}
    figures: list[tuple[str, float, str, Any]] = [
        ("a step", wall * 1e3, "ms", None),
        ("rank 0's thread", whole * 1e3, "ms", {"us_a_row": parts}),
        *((part, value, "us a row", None) for part, value in parts.items()),
    ]
    common = {"batch": spec.batch, "context": spec.context}
    return [
        engine_row(
            engine, case=f"{door}: {case}", value=value, unit=unit, metrics=metrics, **common
        )
        for case, value, unit, metrics in figures
    ]


def _run_loop(engine: Engine, prompts: Sequence[tuple[int, ...]], spec: HostSpec) -> None:
    """The server's loop over the same requests; what it sends is taken from the socket."""
    with tempfile.TemporaryDirectory(prefix="tpdet-bench-") as folder:
        key = bytes(32)
        socket = EngineSocket(folder, key)
        reader: Any = zmq.Context.instance().socket(zmq.PAIR)
        reader.connect(socket.address)
        reader.send(protocol.HttpEnd(key).encode(protocol.Ping()))
        socket.receive(_CONNECT_SECONDS)  # until then nothing can be sent to the reader
        bridge = Bridge([HttpLink(socket, _NoProcess())], 3600.0)
        canary = Canary(engine, 0.0)
        submit(engine, prompts, spec.tokens, "loop", spec.temperature, spec.top_p)
        while engine.has_work:
            bridge.report(engine, canary_mismatches=0)
            bridge.receive(engine, 0.0)
            began = time.monotonic()
            outputs = canary.take(engine.step())
            bridge.deliver(outputs, time.monotonic() - began)
            while reader.poll(0):
                reader.recv()
        reader.close()
        socket.close()


class _NoProcess(HttpProcess):
    """In place of the HTTP process: it is always there."""

    def __init__(self) -> None:
        """Start nothing."""

    @property
    def exit_code(self) -> int | None:
        """None: it runs."""
        return None


def plan_only(engine: Engine) -> None:
    """Let `engine` run ahead, and replace graphs and sampling by what runs no model.

    What stands in is the device alone: the graphs are empty, and what they would sample is a table.
    """
    engine.run_ahead = True
    runner, config = engine.runner, engine.config
    assert runner.pages is not None
    width, linear = -(-runner.max_model_len // PAGE_TOKENS), runner.pages.states is not None
    shapes = decode_shapes(config.max_running, width, linear=linear)
    room = _EmptyRoom(runner.device, max(shape.words for shape in shapes))
    source = GraphSource(runner.model, runner.model, runner.pages, runner.sampled, room)
    decode = _EmptyGraphs(source, shapes)
    runner.graphs = Graphs(decode, None, fixed_batch=False)
    runner.sharing = _FixedTokens(engine.model_config.vocab_size)


class _NoLaunch:
    def replay(self) -> None:
        """Launch nothing."""


class _EmptyRoom(GraphRoom):
    def capture(self, step: object, first: object) -> Graph:
        """A graph that launches nothing."""
        return _NoLaunch()


class _EmptyGraphs(DecodeGraphs):
    def run(self, rows: object, moves: object = None) -> torch.Tensor:
        """Pack the rows; the logits are zeros."""
        if not self._kept:
            self._kept = (torch.zeros(self._buckets[-1][0].rows, 1),)
        return super().run(rows)  # type: ignore[arg-type]  # no draft is verified here

    def _step(self, *_: object, **more: object) -> None:
        """Run no model."""


class _FixedTokens(RowSharing):
    """Ranks that sample together, and whose tokens are known beforehand."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.several = self.open = True
        self._most = HEAD_ROWS

    def follow(self, plan: StepPlan) -> SampleTogether | None:
        """How the step's tokens are found: each is a number of its row and step."""

        def sample(first: int, logits: torch.Tensor, moved: torch.Tensor | None) -> PendingSample:
            count = len(logits)
            tokens = (torch.arange(first, first + count) * 7 + plan.step) % self._vocabulary
            packed = torch.empty(count, 3, dtype=torch.float64)
            packed[:, 0], packed[:, 1], packed[:, 2] = 1.0, tokens, _LOGPROB
            return PendingSample(
                tokens, packed, (None,) * count, (0,) * count, packed.view(-1), None
            )

        return sample
