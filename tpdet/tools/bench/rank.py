"""One rank of a world that times the engine: `-m tpdet.tools.bench.rank SPEC RESULT`."""

import sys
from pathlib import Path

import msgspec

from tpdet.comm.device import open_world
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.tools.bench.latency import time_latency
from tpdet.tools.bench.spec import BenchResult, EngineSpec
from tpdet.tools.bench.throughput import time_mixed
from tpdet.tools.worlds.machine import machine
from tpdet.tools.worlds.worlds import run_rank


def main(arguments: list[str]) -> int:
    """Run every case; rank 0 writes the rows."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=EngineSpec)
    config = EngineConfig.from_values(**({"drafts": "off"} | spec.settings))
    world = open_world(
        config.device, config.step_timeout, share_gpus=True, transport=config.transport
    )
    engine = Engine(config, world, streams=False)  # as `LLM` has it
    if world.rank > 0:
        engine.worker_loop()
    else:
        rows, notes = time_latency(engine, spec) if spec.latency else time_mixed(engine, spec)
        engine.stop_workers()
        result = BenchResult(
            rows=tuple(rows), machine=machine(config.device, world.size), notes=tuple(notes)
        )
        Path(arguments[1]).write_bytes(msgspec.json.encode(result))
    world.barrier()
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_rank(main))
