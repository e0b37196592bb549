"""Runs a benchmark's worlds, and is their rank: `-m tpdet.tools.bench.run SPEC RESULT`."""

import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import msgspec

from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.fit import check_ranks
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import resolve_device
from tpdet.config import EngineConfig
from tpdet.tools.bench.spec import BenchResult, Spec
from tpdet.tools.measurement.rows import BenchRow
from tpdet.tools.worlds.room import check_sizes, gpus_here
from tpdet.tools.worlds.worlds import run_rank, run_world


def run_worlds(
    tps: Sequence[int], spec: Spec, engine: EngineConfig | None = None
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
            arguments = [str(folder / "spec.json"), str(result)]
            run_world(tp, __name__, arguments, folder)
            results.append(msgspec.json.decode(result.read_bytes(), type=BenchResult))
            for note in results[-1].notes:
                print(note, file=sys.stderr, flush=True)
    rows = [row for result in results for row in result.rows]
    return rows, max(results, key=lambda result: result.machine.gpus)


def main(arguments: list[str]) -> int:
    """Do the work of the spec; the rank that has a result, rank 0, writes it."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Spec)
    result = import_module(f"tpdet.tools.bench.{spec.module}").measure(spec)
    if result is not None:
        Path(arguments[1]).write_bytes(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_rank(main))
