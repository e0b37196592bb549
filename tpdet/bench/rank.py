"""One rank of a benchmark world: `torchrun ... -m tpdet.bench.rank SPEC.json RESULT.json`."""

import random
import statistics
import sys
import time
from pathlib import Path

import msgspec

from tpdet.comm.distributed import DistributedWorld
from tpdet.comm.world import SoloWorld, World
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.launch.environment import read_environment
from tpdet.request import Request, SamplingParams

_WARM_UP_STEPS = 3


class BenchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one benchmark covers."""

    model: str
    dtype: str
    load_format: str
    batches: tuple[int, ...]
    prompt_tokens: int
    prefill_tokens: int
    steps: int
    step_timeout: float = 600.0


class BenchRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure: a case of DESIGN's results files."""

    case: str
    model: str
    dtype: str
    mode: str
    tp: int
    value: float
    unit: str
    batch: int | None = None
    context: int | None = None
    floor: float | None = None


def main(arguments: list[str]) -> int:
    """Run every case; rank 0 writes the rows."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=BenchSpec)
    size = read_environment().size
    world: World = DistributedWorld(timeout=spec.step_timeout) if size > 1 else SoloWorld()
    config = EngineConfig.from_values(
        model=spec.model,
        dtype=spec.dtype,
        load_format=spec.load_format,
        step_timeout=spec.step_timeout,
        max_num_seqs=max(spec.batches),
    )
    engine = Engine(config, world)
    if world.rank > 0:
        engine.worker_loop()
    else:
        rows = [_decode(engine, spec, batch) for batch in spec.batches]
        rows.append(_prefill(engine, spec))
        engine.stop_workers()
        Path(arguments[1]).write_bytes(msgspec.json.encode(rows))
    world.barrier()
    world.close()
    return 0


def _decode(engine: Engine, spec: BenchSpec, batch: int) -> BenchRow:
    """Median milliseconds of a step in which `batch` sequences decode one token each."""
    tokens = spec.steps + _WARM_UP_STEPS + 2
    _submit(engine, batch, spec.prompt_tokens, tokens, f"decode-{batch}")
    times: list[float] = []
    while engine.has_work:
        begin = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == batch:
            times.append(time.perf_counter() - begin)
    value = statistics.median(times[_WARM_UP_STEPS:]) * 1e3
    return _row(engine, spec, case="decode", batch=batch, context=spec.prompt_tokens,
                value=value, unit="ms")  # fmt: skip


def _prefill(engine: Engine, spec: BenchSpec) -> BenchRow:
    """Prompt tokens a second over four prompts, one token generated each."""
    prompts = 4
    _submit(engine, prompts, spec.prefill_tokens, 1, "prefill")
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    value = prompts * spec.prefill_tokens / (time.perf_counter() - begin)
    return _row(engine, spec, case="prefill", batch=prompts, context=spec.prefill_tokens,
                value=value, unit="tokens/s")  # fmt: skip


def _submit(engine: Engine, count: int, length: int, tokens: int, name: str) -> None:
    draw = random.Random(count * length)
    vocab_size = engine.model_config.vocab_size
    for index in range(count):
        prompt = tuple(draw.randrange(vocab_size) for _ in range(length))
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.submit(Request(request_id=f"{name}-{index}", prompt_token_ids=prompt, params=params))


def _row(engine: Engine, spec: BenchSpec, **fields: object) -> BenchRow:
    return BenchRow(
        model=Path(spec.model).name,
        dtype=engine.model_config.dtype,
        mode=engine.config.fold_order,
        tp=engine.world.size,
        **fields,  # type: ignore[arg-type]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
