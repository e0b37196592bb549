"""One rank of a benchmark world: `torchrun ... -m tpdet.bench.rank SPEC.json RESULT.json`."""

import random
import statistics
import sys
import time
from pathlib import Path

import msgspec

from tpdet.bench.floor import decode_floor_ms
from tpdet.comm.device import open_world, ranks_per_gpu
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.request import Request, SamplingParams
from tpdet.verify.machine import machine
from tpdet.verify.spec import Machine

_WARM_UP_STEPS = 3
_WARM_UP_PROMPTS = 2


class BenchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one benchmark covers."""

    model: str
    dtype: str
    load_format: str
    device: str
    fold_order: str
    batches: tuple[int, ...]
    prompt_tokens: int
    prefill_tokens: int
    prefill_prompts: int
    budget: int
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
    ratio: float | None = None


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one world measured, and where."""

    rows: tuple[BenchRow, ...]
    machine: Machine


def main(arguments: list[str]) -> int:
    """Run every case; rank 0 writes the rows."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=BenchSpec)
    world = open_world(spec.device, spec.step_timeout, share_gpus=True)
    config = EngineConfig.from_values(
        model=spec.model,
        dtype=spec.dtype,
        device=spec.device,
        fold_order=spec.fold_order,
        load_format=spec.load_format,
        step_timeout=spec.step_timeout,
        enforce_eager=ranks_per_gpu() > 1,  # host memory is no part of a graph
        max_num_seqs=max(*spec.batches, spec.prefill_prompts),
        max_model_len=max(spec.prompt_tokens + spec.steps + 8, spec.prefill_tokens + 8),
        max_num_batched_tokens=spec.budget,
    )
    engine = Engine(config, world)
    if world.rank > 0:
        engine.worker_loop()
    else:
        rows = [_decode(engine, spec, batch) for batch in spec.batches]
        rows.append(_prefill(engine, spec))
        engine.stop_workers()
        result = BenchResult(rows=tuple(rows), machine=machine(spec.device, world.size))
        Path(arguments[1]).write_bytes(msgspec.json.encode(result))
    world.barrier()
    engine.close()
    return 0


def _decode(engine: Engine, spec: BenchSpec, batch: int) -> BenchRow:
    """Median milliseconds of a step in which `batch` sequences decode one token each.

    A step ends with its tokens on the host, so the clock sees all the work of the device.
    """
    tokens = spec.steps + _WARM_UP_STEPS + 2
    _submit(engine, batch, spec.prompt_tokens, tokens, f"decode-{batch}")
    times: list[float] = []
    while engine.has_work:
        begin = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == batch:
            times.append(time.perf_counter() - begin)
    value = statistics.median(times[_WARM_UP_STEPS:]) * 1e3
    floor = decode_floor_ms(engine)
    return _row(engine, spec, case="decode", batch=batch, context=spec.prompt_tokens, value=value,
                unit="ms", floor=floor, ratio=value / floor if floor else None)  # fmt: skip


def _prefill(engine: Engine, spec: BenchSpec) -> BenchRow:
    """Prompt tokens a second over all prompts together, one token generated each."""
    prompts, length = spec.prefill_prompts, spec.prefill_tokens
    _submit(engine, min(prompts, _WARM_UP_PROMPTS), length, 1, "warm-up")
    while engine.has_work:
        engine.step()
    _submit(engine, prompts, length, 1, "prefill")
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    value = prompts * length / (time.perf_counter() - begin)
    return _row(engine, spec, case="prefill", batch=prompts, context=length, value=value,
                unit="tokens/s")  # fmt: skip


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
