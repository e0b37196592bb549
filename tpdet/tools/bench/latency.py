"""Times of the engine's steps: decode by batch and context, and prefill.

A step's time is what a client sees: from the end of one step to the end of the next, in steady
state. An engine that launches a step ahead makes it shorter than the latency of one step.
"""

import statistics
import time
from itertools import pairwise
from pathlib import Path

from tpdet.config import APPROXIMATE
from tpdet.engine import Engine
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.tools.bench.load import prompt, submit
from tpdet.tools.bench.report.floor import Rates, decode_work, here, prefill_work
from tpdet.tools.bench.report.record import BenchRow
from tpdet.tools.bench.spec import EngineSpec, LatencyCases

_WARM_UP_STEPS = 3
_WARM_UP_PROMPTS = 2
_LAST_STEPS = 2  # in which nothing follows


def time_latency(engine: Engine, spec: EngineSpec) -> tuple[list[BenchRow], list[str]]:
    """Rows of every case, and the cases that the engine's limits leave out, with reasons."""
    cases = spec.latency
    if cases is None:
        raise ValueError("no latency cases")
    rows, notes = [], []
    for context in cases.contexts:
        for batch in cases.batches:
            tokens = decode_tokens(cases, step_tokens(engine), batch, context)
            reason = _left_out(engine, batch, context + tokens)
            if reason is None:
                rows.append(_decode(engine, batch, context, tokens))
            else:
                notes.append(f"decode, {_sizes(engine, batch, context)}: left out, {reason}")
    for length in cases.prefill_tokens:
        reason = _left_out(engine, 1, length + 1)
        if reason is None:
            rows.append(_prefill(engine, cases, length))
        else:
            sizes = _sizes(engine, cases.prefill_prompts, length)
            notes.append(f"prefill, {sizes}: left out, {reason}")
    return rows, notes


def step_tokens(engine: Engine) -> int:
    """Tokens of a step, at most."""
    return engine.scheduler.policy.max_num_batched_tokens


def decode_tokens(cases: LatencyCases, budget: int, batch: int, context: int) -> int:
    """Tokens each sequence generates: the first ones do while the last ones' prompts are read.

    budget: tokens of a step, at most.
    """
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
    # Prompts that nobody has sent yet: what is timed is computed, and no prefix cache holds it.
    fresh = [
        prompt(length, vocabulary, f"prefill-{count}-{length}-{i}")
        for i in range(_WARM_UP_PROMPTS + count)
    ]
    warm_up, prompts = fresh[:_WARM_UP_PROMPTS], fresh[_WARM_UP_PROMPTS:]
    submit(engine, warm_up, 1, "warm-up")
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

    The mode is the fold order, the rule of its row layers, or APPROXIMATE; and who drafts.
    """
    config, transport = engine.config, engine.config.transport
    mode = str(config.fold_order if config.row_layers == "fold" else config.row_layers)
    if engine.approximate:
        mode = APPROXIMATE
    if config.drafters:
        mode += f", drafts {config.drafts}"
    if config.draft_model is not None:
        mode += f" and {Path(config.draft_model).name}"
    return BenchRow(
        model=Path(engine.config.model).name,
        dtype=engine.model_config.dtype,
        mode=mode if transport == "auto" else f"{mode}, {transport}",
        tp=engine.world.size,
        budget=step_tokens(engine),
        **fields,  # type: ignore[arg-type]
    )


def engine_rates(engine: Engine) -> Rates | None:
    """The rates of the engine's GPU, if it has one that was measured."""
    return here() if engine.runner.device.type == "cuda" else None
