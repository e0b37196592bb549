"""`tpdet bench throughput`: time of a mixed load, all its requests submitted at once."""

import argparse
import time

from tpdet.engine import Engine
from tpdet.tools.bench.engine import engine_of, measure_engine, ready, row_beside_floor
from tpdet.tools.bench.load import lengths, prompt, run_all, submit
from tpdet.tools.bench.run import run_worlds
from tpdet.tools.bench.spec import BenchResult, MixedSpec
from tpdet.tools.measurement.floor import mixed_work
from tpdet.tools.measurement.rows import BenchRow, finish
from tpdet.tools.worlds.lists import parse_range

_WARM_UP_REQUESTS = 4
_WARM_UP_TOKENS = 4


def throughput_command(options: argparse.Namespace) -> int:
    """A mixed load on a model, a world a size; its rows go beside those of latency."""
    shortest, longest = parse_range(options.input)
    with engine_of(options) as engine:
        spec = MixedSpec(
            settings=engine.model_dump(exclude_unset=True),
            requests=options.requests,
            shortest=shortest,
            longest=longest,
            generate=options.generate,
            seed=options.seed,
        )
        tps, config, rates = ready(options, engine)
        if rates is not None:
            work = mixed_work(config, _lengths(spec), spec.generate)
            for tp in tps:
                print(f"floor, TP {tp}: {work.over(tp).seconds(rates):.3f} s", flush=True)
        rows, largest = run_worlds(tps, spec, engine)
    return finish(
        "throughput", largest.machine, rows, options.output, as_json=options.json, file="latency"
    )


def _lengths(case: MixedSpec) -> list[int]:
    return lengths(case.requests, case.shortest, case.longest, case.seed)


def measure(spec: MixedSpec) -> BenchResult | None:
    """One rank; the result on rank 0."""
    return measure_engine(spec, time_mixed)


def time_mixed(engine: Engine, case: MixedSpec) -> tuple[list[BenchRow], list[str]]:
    """Seconds until the last token of the last request, and tokens generated a second."""
    counts, vocabulary = _lengths(case), engine.model_config.vocab_size
    prompts = [prompt(count, vocabulary, case.seed + i) for i, count in enumerate(counts)]
    # Other prompts than the timed ones, which no prefix cache is to hold.
    warm_up = [prompt(n, vocabulary, f"warm-up-{n}") for n in counts[:_WARM_UP_REQUESTS]]
    submit(engine, warm_up, min(case.generate, _WARM_UP_TOKENS), "warm-up")
    run_all(engine)
    begin = time.perf_counter()
    submit(engine, prompts, case.generate, "mixed")
    _, tokens = run_all(engine)
    seconds = time.perf_counter() - begin
    asked = case.requests * case.generate
    if tokens != asked:
        raise RuntimeError(f"{tokens} tokens were generated, not {asked}: a request failed")
    work = mixed_work(engine.model_config, counts, case.generate)
    common = {"batch": case.requests, "context": case.longest}
    return [
        row_beside_floor(engine, work, seconds, value, unit, case=name, **common)
        for name, value, unit in (
            ("mixed", seconds, "s"),
            ("mixed output", tokens / seconds, "tokens/s"),
        )
    ], []
