"""`tpdet bench latency`, `throughput` and `allreduce`: one world a tensor-parallel size."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.model_config.fit import check_ranks
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import resolve_device
from tpdet.config import EngineConfig
from tpdet.errors import UsageError
from tpdet.kernels.order import DEFAULT_LEAVES, fold_plan
from tpdet.tools.bench.engine import engine_of
from tpdet.tools.bench.kernels.gpu import gpu_only
from tpdet.tools.bench.load import lengths
from tpdet.tools.bench.report.floor import (
    Rates,
    decode_work,
    exchange_seconds,
    here,
    mixed_work,
    prefill_work,
)
from tpdet.tools.bench.report.record import BenchRow, finish
from tpdet.tools.bench.spec import (
    BenchResult,
    DraftsSpec,
    EngineSpec,
    ExchangeSpec,
    GenerateSpec,
    LatencyCases,
    MixedCase,
    output_rows,
)
from tpdet.tools.verify.room import check_sizes, gpus_here
from tpdet.tools.verify.run import parse_sizes
from tpdet.tools.worlds.worlds import run_world


def latency_command(options: argparse.Namespace) -> int:
    """Decode steps and prefill of a model, a world a size."""
    cases = LatencyCases(
        batches=parse_sizes(options.batch),
        contexts=parse_sizes(options.context),
        steps=options.steps,
        prefill_tokens=parse_sizes(options.prefill_tokens),
        prefill_prompts=options.prefill_prompts,
    )
    with engine_of(options) as engine:
        tps, config, rates = _ready(options, engine)
        if rates is not None:
            _print_floors(cases, tps, config, rates)
        spec = EngineSpec(settings=engine.model_dump(exclude_unset=True), latency=cases)
        rows, largest = run_worlds(tps, "tpdet.tools.bench.rank", spec, engine)
    finish("latency", largest.machine, rows, options.output, as_json=options.json)
    return 0


def throughput_command(options: argparse.Namespace) -> int:
    """A mixed load on a model, a world a size; its rows go beside those of latency."""
    shortest, longest = parse_range(options.input)
    case = MixedCase(
        requests=options.requests,
        shortest=shortest,
        longest=longest,
        generate=options.generate,
        seed=options.seed,
    )
    of_load = lengths(case.requests, shortest, longest, case.seed)
    with engine_of(options) as engine:
        tps, config, rates = _ready(options, engine)
        work = mixed_work(config, of_load, case.generate)
        if rates is not None:
            for tp in tps:
                print(f"floor, TP {tp}: {work.over(tp).seconds(rates):.3f} s", flush=True)
        spec = EngineSpec(settings=engine.model_dump(exclude_unset=True), mixed=case)
        rows, largest = run_worlds(tps, "tpdet.tools.bench.rank", spec, engine)
    finish(
        "throughput", largest.machine, rows, options.output, as_json=options.json, file="latency"
    )
    return 0


def allreduce_command(options: argparse.Namespace) -> int:
    """The exchange between ranks beside NCCL's all-reduce, a world a size."""
    gpu_only("allreduce")
    tps = parse_sizes(options.tp)
    if min(tps) < 2:
        raise UsageError("--tp: an exchange needs 2 ranks or more")
    spec = ExchangeSpec(
        kilobytes=parse_sizes(options.kilobytes),
        hidden=options.hidden,
        fold_order=options.fold_order,
        repeats=options.repeats,
    )
    rates = here()
    if rates is not None:
        for tp in tps:
            plan = fold_plan(spec.fold_order, DEFAULT_LEAVES, tp)
            values = [output_rows(size, spec.hidden) * spec.hidden for size in spec.kilobytes]
            floors = [exchange_seconds(rates, plan, count) * 1e6 for count in values]
            figures = " / ".join(f"{floor:.1f}" for floor in floors)
            print(f"floor, TP {tp}, {options.kilobytes} KB: {figures} us", flush=True)
    rows, largest = run_worlds(tps, "tpdet.tools.bench.exchange_rank", spec)
    finish("allreduce", largest.machine, rows, options.output, as_json=options.json)
    return 0


def parse_range(text: str) -> tuple[int, int]:
    """ "64:1024" as two numbers, "64" as twice the same. Raises UsageError."""
    parts = text.split(":")
    try:
        shortest, longest = int(parts[0]), int(parts[-1])
    except ValueError as error:
        raise UsageError(f"{text!r} is not a range of lengths such as 64:1024") from error
    if len(parts) > 2 or not 1 <= shortest <= longest:
        raise UsageError(f"{text!r} is not a range of lengths such as 64:1024")
    return shortest, longest


def _ready(
    options: argparse.Namespace, engine: EngineConfig
) -> tuple[tuple[int, ...], ModelConfig, Rates | None]:
    """Sizes, model and the GPU's rates; a model that cannot be loaded is refused here."""
    config = load_model_config(resolve_model(engine.model, engine.revision), engine.dtype)
    cuda = resolve_device(engine.device) == "cuda"
    return parse_sizes(options.tp), config, here() if cuda else None


def _print_floors(
    cases: LatencyCases, tps: Sequence[int], config: ModelConfig, rates: Rates
) -> None:
    batches = "/".join(map(str, cases.batches))
    for tp in tps:
        for context in cases.contexts:
            each = [decode_work(config, b, context).over(tp).seconds(rates) for b in cases.batches]
            figures = " / ".join(f"{seconds * 1e3:.2f}" for seconds in each)
            print(f"floor, TP {tp}, context {context}, batch {batches}: {figures} ms a step")
        for length in cases.prefill_tokens:
            seconds = prefill_work(config, cases.prefill_prompts, length).over(tp).seconds(rates)
            speed = cases.prefill_prompts * length / seconds
            print(f"floor, TP {tp}: prefill of {length} {speed:,.0f} tokens/s", flush=True)


def run_worlds(
    tps: Sequence[int],
    module: str,
    spec: EngineSpec | GenerateSpec | ExchangeSpec | DraftsSpec,
    engine: EngineConfig | None = None,
) -> tuple[list[BenchRow], BenchResult]:
    """Rows of all worlds, and the result of the one with most GPUs.

    Raises UsageError, before any world starts, for a size that does not fit the engine's model, and
    ResourceError for one whose weights do not fit the GPUs.
    """
    results: list[BenchResult] = []
    if engine is not None:
        config = load_model_config(resolve_model(engine.model, engine.revision), engine.dtype)
        for tp in tps:
            check_ranks(config, tp, engine.leaves)
        if resolve_device(engine.device) == "cuda":
            check_sizes(engine, tps, gpus_here())
    with tempfile.TemporaryDirectory(prefix="tpdet-bench-") as name:
        folder = Path(name)
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        for tp in tps:
            result = folder / f"tp{tp}.json"
            run_world(tp, module, [str(folder / "spec.json"), str(result)], folder)
            results.append(msgspec.json.decode(result.read_bytes(), type=BenchResult))
            for note in results[-1].notes:
                print(note, file=sys.stderr, flush=True)
    rows = [row for result in results for row in result.rows]
    return rows, max(results, key=lambda found: found.machine.gpus)
