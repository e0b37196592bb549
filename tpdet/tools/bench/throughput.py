"""Time of a mixed load: many requests of many lengths, all submitted at once."""

import time

from tpdet.engine import Engine
from tpdet.requests.request import TokenOutput
from tpdet.tools.bench.latency import engine_rates, engine_row
from tpdet.tools.bench.load import lengths, prompt, submit
from tpdet.tools.bench.report.floor import mixed_work
from tpdet.tools.bench.report.record import BenchRow
from tpdet.tools.bench.spec import EngineSpec

_WARM_UP_REQUESTS = 4
_WARM_UP_TOKENS = 4


def time_mixed(engine: Engine, spec: EngineSpec) -> tuple[list[BenchRow], list[str]]:
    """Seconds until the last token of the last request, and tokens generated a second."""
    case = spec.mixed
    if case is None:
        raise ValueError("no mixed case")
    counts = lengths(case.requests, case.shortest, case.longest, case.seed)
    vocabulary = engine.model_config.vocab_size
    prompts = [prompt(count, vocabulary, case.seed + i) for i, count in enumerate(counts)]
    # Other prompts than the timed ones, which no prefix cache is to hold.
    warm_up = [prompt(n, vocabulary, f"warm-up-{n}") for n in counts[:_WARM_UP_REQUESTS]]
    submit(engine, warm_up, min(case.generate, _WARM_UP_TOKENS), "warm-up")
    while engine.has_work:
        engine.step()
    begin = time.perf_counter()
    submit(engine, prompts, case.generate, "mixed")
    tokens = 0
    while engine.has_work:
        tokens += sum(isinstance(output, TokenOutput) for output in engine.step())
    seconds = time.perf_counter() - begin
    wanted = case.requests * case.generate
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens were generated, not {wanted}: a request failed")
    work = mixed_work(engine.model_config, counts, case.generate).over(engine.world.size)
    rates = engine_rates(engine)
    floor = None if rates is None else work.seconds(rates)
    row = engine_row(
        engine,
        case="mixed",
        batch=case.requests,
        context=case.longest,
        value=seconds,
        unit="s",
        floor=floor,
        ratio=floor and seconds / floor,
    )
    rate = engine_row(
        engine,
        case="mixed output",
        batch=case.requests,
        context=case.longest,
        value=tokens / seconds,
        unit="tokens/s",
        floor=floor and tokens / floor,
        ratio=floor and seconds / floor,
    )
    return [row, rate], []
