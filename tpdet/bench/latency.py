"""Times of the engine's steps: decode by batch and context, and prefill.

A step's time is what a client sees: from the end of one step to the end of the next, in steady
state. An engine that launches a step ahead makes it shorter than the latency of one step.
"""

import statistics
import time
from itertools import pairwise
from pathlib import Path

from tpdet.bench.load import prompt, submit
from tpdet.bench.report.floor import Rates, decode_work, here, prefill_work
from tpdet.bench.report.record import BenchRow
from tpdet.bench.spec import EngineSpec, LatencyCases
from tpdet.config import APPROXIMATE
from tpdet.engine import Engine
from tpdet.kernels.order import PAGE_TOKENS

_WARM_UP_STEPS = 3
_WARM_UP_PROMPTS = 2
_LAST_STEPS = 2  # in which nothing follows


def time_latency(engine: Engine, spec: EngineSpec) -> tuple[list[BenchRow], list[str]]:
    """Rows of every case, and the cases that the cache cannot hold."""
    cases = spec.latency
    if cases is None:
        raise ValueError("no latency cases")
    rows, notes = [], []
    for context in cases.contexts:
        for batch in cases.batches:
            tokens = decode_tokens(spec, batch, context)
            pages = batch * -(-(context + tokens) // PAGE_TOKENS)
            if pages > engine.runner.num_pages:
                notes.append(
                    f"decode, TP {engine.world.size}, batch {batch}, context {context}: left out, "
                    f"it takes {pages} pages of {engine.runner.num_pages}"
                )
                continue
            rows.append(_decode(engine, batch, context, tokens))
    rows += [_prefill(engine, cases, length) for length in cases.prefill_tokens]
    return rows, notes


def decode_tokens(spec: EngineSpec, batch: int, context: int) -> int:
    """Tokens each sequence generates: the first ones do while the last ones' prompts are read."""
    cases = spec.latency
    timed = _WARM_UP_STEPS + _LAST_STEPS + (cases.steps if cases else 0)
    free = max(1, spec.budget - batch)  # of a step in which the others decode
    return timed + -(-batch * context // free)


def _decode(engine: Engine, batch: int, context: int, tokens: int) -> BenchRow:
    """Median milliseconds between the ends of steps in which `batch` sequences decode."""
    vocabulary = engine.model_config.vocab_size
    prompts = [prompt(context, vocabulary, batch * context + i) for i in range(batch)]
    submit(engine, prompts, tokens, f"decode-{batch}-{context}")
    ends: list[float] = []
    while engine.has_work:
        if len(engine.step()) == batch:
            ends.append(time.perf_counter())
    value = statistics.median(_between(ends)) * 1e3
    work = decode_work(engine.model_config, batch, context).over(engine.world.size)
    rates = engine_rates(engine)
    floor = None if rates is None else work.seconds(rates) * 1e3
    return engine_row(
        engine,
        case="decode",
        batch=batch,
        context=context,
        value=value,
        unit="ms",
        floor=floor,
        ratio=floor and value / floor,
    )


def _between(ends: list[float]) -> list[float]:
    """Seconds from end to end, without the first steps and the last."""
    steady = ends[_WARM_UP_STEPS : len(ends) - 1]
    if len(steady) < 2:
        raise RuntimeError(f"{len(ends)} whole steps are too few to time: ask for more --steps")
    return [end - begin for begin, end in pairwise(steady)]


def _prefill(engine: Engine, cases: LatencyCases, length: int) -> BenchRow:
    """Prompt tokens a second over all prompts together, one token generated each."""
    count, vocabulary = cases.prefill_prompts, engine.model_config.vocab_size
    prompts = [prompt(length, vocabulary, count * length + i) for i in range(count)]
    submit(engine, prompts[:_WARM_UP_PROMPTS], 1, "warm-up")
    while engine.has_work:
        engine.step()
    submit(engine, prompts, 1, "prefill")
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    value = count * length / (time.perf_counter() - begin)
    least = prefill_work(engine.model_config, count, length).over(engine.world.size)
    rates = engine_rates(engine)
    floor = None if rates is None else count * length / least.seconds(rates)
    return engine_row(
        engine,
        case="prefill",
        batch=count,
        context=length,
        value=value,
        unit="tokens/s",
        floor=floor,
        ratio=floor and floor / value,
    )


def engine_row(engine: Engine, **fields: object) -> BenchRow:
    """A row about this engine; a transport that was asked for is part of its mode.

    The mode is the fold order, the rule of its row layers, or APPROXIMATE.
    """
    config, transport = engine.config, engine.config.transport
    mode = str(config.fold_order if config.row_layers == "fold" else config.row_layers)
    if engine.approximate:
        mode = APPROXIMATE
    return BenchRow(
        model=Path(engine.config.model).name,
        dtype=engine.model_config.dtype,
        mode=mode if transport == "auto" else f"{mode}, {transport}",
        tp=engine.world.size,
        **fields,  # type: ignore[arg-type]
    )


def engine_rates(engine: Engine) -> Rates | None:
    """The rates of the engine's GPU, if it has one that was measured."""
    return here() if engine.runner.device.type == "cuda" else None
