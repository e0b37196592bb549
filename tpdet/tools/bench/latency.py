"""`tpdet bench latency`: times of the engine's steps, decode by batch and context, and prefill.

A step's time is what a client sees: from the end of one step to the end of the next, in steady
state. An engine that launches a step ahead makes it shorter than the latency of one step.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.engine import Engine
from tpdet.kernels.cuda.hardware import Rates
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.tools.bench.engine import engine_of, measure_engine, ready, row_beside_floor
from tpdet.tools.bench.load import prompt, run_all, submit
from tpdet.tools.bench.run import run_worlds
from tpdet.tools.bench.spec import BenchResult, LatencySpec
from tpdet.tools.measurement.floor import decode_work, prefill_work
from tpdet.tools.measurement.rows import BenchRow, finish
from tpdet.tools.worlds.lists import parse_sizes

_WARM_UP_STEPS = 3
_WARM_UP_PROMPTS = 2
_LAST_STEPS = 2  # in which nothing follows


def latency_command(options: argparse.Namespace) -> int:
    """Decode steps and prefill of a model, a world a size."""
    with engine_of(options) as engine:
        spec = LatencySpec(
            settings=engine.model_dump(exclude_unset=True),
            batches=parse_sizes(options.batch),
            contexts=parse_sizes(options.context),
            steps=options.steps,
            prefill_tokens=parse_sizes(options.prefill_tokens),
            prefill_prompts=options.prefill_prompts,
        )
        tps, config, rates = ready(options, engine)
        if rates is not None:
            _print_floors(spec, tps, config, rates, engine.kv_cache_dtype)
        rows, largest = run_worlds(tps, spec, engine)
    return finish("latency", largest.machine, rows, options.output, as_json=options.json)


def measure(spec: LatencySpec) -> BenchResult | None:
    """One rank; the result on rank 0."""
    return measure_engine(spec, time_latency)


def _print_floors(
    cases: LatencySpec, tps: Sequence[int], config: ModelConfig, rates: Rates, kv_cache_dtype: str
) -> None:
    batches = "/".join(map(str, cases.batches))
    for tp in tps:
        for context in cases.contexts:
            how = context, kv_cache_dtype
            works = (decode_work(config, batch, *how) for batch in cases.batches)
            figures = " / ".join(f"{work.over(tp).seconds(rates) * 1e3:.2f}" for work in works)
            print(f"floor, TP {tp}, context {context}, batch {batches}: {figures} ms a step")
        for length in cases.prefill_tokens:
            seconds = prefill_work(config, cases.prefill_prompts, length).over(tp).seconds(rates)
            speed = cases.prefill_prompts * length / seconds
            print(f"floor, TP {tp}: prefill of {length} {speed:,.0f} tokens/s", flush=True)


def time_latency(engine: Engine, cases: LatencySpec) -> tuple[list[BenchRow], list[str]]:
    """Rows of every case, and the cases that the engine's limits leave out, with reasons."""
    rows, notes, budget = [], [], engine.scheduler.policy.max_num_batched_tokens
    for context in cases.contexts:
        for batch in cases.batches:
            tokens = decode_tokens(cases, budget, batch, context)
            reason = _left_out(engine, batch, context + tokens)
            if reason is None:
                rows.append(_decode(engine, batch, context, tokens))
            else:
                notes.append(f"decode, {_sizes(engine, batch, context)}: left out, {reason}")
    for length in cases.prefill_tokens:
        reason, count = _left_out(engine, 1, length + 1), cases.prefill_prompts
        if reason is None:
            rows.append(_prefill(engine, count, length))
        else:
            notes.append(f"prefill, {_sizes(engine, count, length)}: left out, {reason}")
    return rows, notes


def decode_tokens(cases: LatencySpec, budget: int, batch: int, context: int) -> int:
    """Tokens each sequence generates, while the last prompts are read; budget: of a step."""
    timed = _WARM_UP_STEPS + _LAST_STEPS + cases.steps
    free = max(1, budget - batch)  # of a step in which the others decode
    return timed + -(-batch * context // free)


def _sizes(engine: Engine, batch: int, context: int) -> str:
    return f"TP {engine.world.size}, batch {batch}, context {context}"


def _left_out(engine: Engine, batch: int, length: int) -> str | None:
    """Why `batch` sequences of `length` tokens cannot run together; None if they can."""
    if batch > engine.config.max_running:
        return f"it is over --max-num-seqs {engine.config.max_running}"
    if length > engine.max_model_len:
        return f"{length} tokens are over --max-model-len {engine.max_model_len}"
    pages = batch * -(-length // PAGE_TOKENS)
    if pages > engine.runner.num_pages:
        return f"it takes {pages} pages of {engine.runner.num_pages}"
    return None


def _decode(engine: Engine, batch: int, context: int, tokens: int) -> BenchRow:
    """Median milliseconds between the ends of steps in which `batch` sequences decode."""
    vocabulary = engine.model_config.vocab_size
    name = f"decode-{batch}-{context}"
    prompts = [prompt(context, vocabulary, f"{name}-{i}") for i in range(batch)]
    submit(engine, prompts, tokens, name)
    ends: list[float] = []
    while engine.has_work:
        if len(engine.step()) == batch:
            ends.append(time.perf_counter())
    work = decode_work(engine.model_config, batch, context, engine.config.kv_cache_dtype)
    seconds = statistics.median(_between(ends))
    case = {"case": "decode", "batch": batch, "context": context}
    return row_beside_floor(engine, work, seconds, 1e3 * seconds, "ms", **case)


def _between(ends: list[float]) -> list[float]:
    """Seconds from end to end, without the first steps and the last."""
    steady = ends[_WARM_UP_STEPS : len(ends) - 1]
    if len(steady) < 2:
        raise RuntimeError(f"{len(ends)} whole steps are too few to time: ask for more --steps")
    return [end - begin for begin, end in pairwise(steady)]


def _prefill(engine: Engine, count: int, length: int) -> BenchRow:
    """Prompt tokens a second over all prompts together, one token generated each."""
    vocabulary = engine.model_config.vocab_size
    # Prompts that nobody has sent yet: what is timed is computed, and no prefix cache holds it.
    fresh = [
        prompt(length, vocabulary, f"prefill-{count}-{length}-{i}")
        for i in range(_WARM_UP_PROMPTS + count)
    ]
    warm_up, prompts = fresh[:_WARM_UP_PROMPTS], fresh[_WARM_UP_PROMPTS:]
    submit(engine, warm_up, 1, "warm-up")
    run_all(engine)
    submit(engine, prompts, 1, "prefill")
    seconds, _ = run_all(engine)
    work = prefill_work(engine.model_config, count, length)
    case = {"case": "prefill", "batch": count, "context": length}
    return row_beside_floor(engine, work, seconds, count * length / seconds, "tokens/s", **case)
