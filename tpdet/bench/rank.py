"""One rank of a world that times the engine: `torchrun ... -m tpdet.bench.rank SPEC RESULT`."""

import sys
from pathlib import Path

import msgspec

from tpdet.bench.latency import decode_tokens, time_latency
from tpdet.bench.spec import BenchResult, EngineSpec
from tpdet.bench.throughput import time_mixed
from tpdet.comm.device import open_world, ranks_per_gpu
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.verify.machine import machine

_SPARE_TOKENS = 8


def main(arguments: list[str]) -> int:
    """Run every case; rank 0 writes the rows."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=EngineSpec)
    world = open_world(spec.device, spec.step_timeout, share_gpus=True)
    sequences, tokens = _limits(spec)
    config = EngineConfig.from_values(
        model=spec.model,
        dtype=spec.dtype,
        device=spec.device,
        fold_order=spec.fold_order,
        row_layers=spec.row_layers,
        transport=spec.transport,
        load_format=spec.load_format,
        approximate=spec.approximate,
        step_timeout=spec.step_timeout,
        enforce_eager=ranks_per_gpu() > 1,  # host memory is no part of a graph
        max_num_seqs=sequences,
        max_model_len=tokens,
        max_num_batched_tokens=spec.budget,
        enable_prefix_caching=False,  # what is timed is computed
    )
    engine = Engine(config, world)
    if world.rank > 0:
        engine.worker_loop()
    else:
        rows, notes = time_latency(engine, spec) if spec.latency else time_mixed(engine, spec)
        engine.stop_workers()
        result = BenchResult(
            rows=tuple(rows), machine=machine(spec.device, world.size), notes=tuple(notes)
        )
        Path(arguments[1]).write_bytes(msgspec.json.encode(result))
    world.barrier()
    engine.close()
    return 0


def _limits(spec: EngineSpec) -> tuple[int, int]:
    """Sequences at once and tokens in a sequence, at most."""
    if spec.mixed is not None:
        return spec.mixed.max_num_seqs, spec.mixed.longest + spec.mixed.generate + _SPARE_TOKENS
    cases = spec.latency
    if cases is None:
        raise ValueError("a benchmark of the engine times latency or a mixed load")
    longest = max(
        context + decode_tokens(spec, batch, context)
        for batch in cases.batches
        for context in cases.contexts
    )
    return (
        max(*cases.batches, cases.prefill_prompts),
        max(longest, *cases.prefill_tokens) + _SPARE_TOKENS,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
