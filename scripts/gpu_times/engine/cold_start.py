"""Seconds of a start, by phase: cold and warm cache of kernels, compiled ahead and in turn.

python -m scripts.gpu_times.engine.cold_start [--shape qwen3-8b] [--ranks 1 4] [--in-turn 1]
                                     [--processes 1 4 8]

Every rank of a start is a new process with a GPU of its own and random weights. Sizes are 1 and the
largest of 2 and 4 that there are GPUs for; at the sizes of `--in-turn` (1) a start that compiles
nothing ahead is timed too. `--processes`: how many compile at once on a host, ranks included; a
cold start is timed with each number. Fails if a start that compiles ahead compiles anything
afterwards, be it in admission, warm-up, graphs or the poison check, or finds fewer kernels cold
than warm.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.lib.ports import free_port

LIMIT = 300.0  # seconds of one start
AHEAD, IN_TURN = "ahead", "in turn"


class Watch:
    """Counts what Triton compiles anew, while kernels are compiled ahead and otherwise."""

    def __init__(self) -> None:
        from triton import knobs

        self.early = 0
        self.late: list[str] = []
        self._ahead = False
        knobs.compilation.listener = self._listen

    def _listen(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            return
        if self._ahead:
            self.early += 1
        else:
            self.late.append(src.name)

    def around(self, function):
        """`function`, during which compiling is early."""

        def watched(*arguments):
            self._ahead = True
            try:
                return function(*arguments)
            finally:
                self._ahead = False

        return watched


def start_rank(report: Path, model: str, way: str, processes: int) -> None:
    """One rank: start, write what was seen to `report`, leave."""
    began = time.perf_counter()
    import torch

    from tpdet.comm.device import open_world
    from tpdet.config import EngineConfig
    from tpdet.runner.runner import Runner
    from tpdet.runner.start import compile_ahead

    world = open_world("cuda", LIMIT)
    torch.zeros(1, device="cuda")
    prepared = time.perf_counter() - began
    watch = Watch()
    compile_ahead.compile_ahead = (
        watch.around(compile_ahead.compile_ahead) if way == AHEAD else lambda *_: 0
    )
    compile_ahead.PROCESSES = processes
    config = EngineConfig.from_values(
        model=model, load_format="dummy", device="cuda", compile_ahead=True
    )
    runner = Runner.start(config, world)
    runner.check_poison()
    row = {
        "seconds": {"import, GPU, world": prepared} | runner.times.seconds,
        "total": prepared + runner.times.total, "known": runner.times.kernels,
        "early": watch.early, "late": watch.late,
    }  # fmt: skip
    report.write_text(json.dumps(row))
    runner.close()
    world.close()


def start(
    ranks: int, model: str, way: str, processes: int, cache: Path, folder: Path
) -> list[dict]:
    """Start once; every rank's row. Raises RuntimeError if a rank fails."""
    shared = os.environ | {
        "TRITON_CACHE_DIR": str(cache),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    reports = [folder / f"{rank}.json" for rank in range(ranks)]
    for report in reports:
        report.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "scripts.gpu_times.engine.cold_start"]
    command += ["--model", model, "--way", way]
    command += ["--processes", str(processes)]
    started = [
        subprocess.Popen(
            [*command, "--report", str(report)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, report in enumerate(reports)
    ]
    deadline = time.monotonic() + LIMIT
    try:
        codes = [each.wait(max(1.0, deadline - time.monotonic())) for each in started]
    finally:
        for each in started:
            each.kill()
    if any(codes):
        raise RuntimeError(f"ranks of a start {way} ended with {codes}")
    return [json.loads(report.read_text()) for report in reports]


def show(name: str, rows: list[dict], whole: float) -> None:
    """The slowest rank's phases, and what each compiled."""
    slowest = max(rows, key=lambda row: row["total"])
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in slowest["seconds"].items())
    print(f"{name:24} {slowest['total']:6.1f} s, process {whole:.1f} s: {phases}")
    for rank, row in enumerate(rows):
        late = f", LATE: {sorted(row['late'])}" if row["late"] and row["known"] else ""
        print(
            f"    rank {rank}: {row['known']} known, {row['early']} compiled ahead, "
            f"{len(row['late'])} in turn{late}",
            flush=True,
        )


def run_size(
    ranks: int, model: str, in_turn: bool, processes: list[int], folder: Path
) -> list[str]:
    """All starts of one size; what is wrong."""
    wrong, known, place = [], {}, folder
    starts = [("cold", AHEAD, count) for count in processes]
    starts += [("warm", AHEAD, processes[-1])] + [("cold", IN_TURN, 1)] * in_turn
    for cache, way, count in starts:
        place = Path(tempfile.mkdtemp(dir=folder)) if cache == "cold" else place
        begin = time.perf_counter()
        rows = start(ranks, model, way, count, place, folder)
        name = f"TP {ranks}, {cache}, {way}, {count}"
        show(name, rows, time.perf_counter() - begin)
        if way == IN_TURN:
            continue
        known[cache] = [row["known"] for row in rows]
        wrong += [f"{name}: rank {r} compiled late" for r, row in enumerate(rows) if row["late"]]
        compiled = sum(row["early"] for row in rows)
        if (compiled == 0) != (cache == "warm"):
            wrong.append(f"{name}: {compiled} kernels compiled ahead")
    if known["cold"] != known["warm"]:
        wrong.append(f"TP {ranks}: {known['cold']} kernels known cold, {known['warm']} warm")
    return wrong


def main(arguments: list[str]) -> int:
    """1 if something is wrong."""
    import torch

    from tpdet.checkpoint.model_config.known_shapes import write_shape
    from tpdet.runner.start.compile_ahead import PROCESSES

    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_times.engine.cold_start", allow_abbrev=False
    )
    parser.add_argument("--shape", default="qwen3-8b")
    sizes = [1, *[size for size in (4, 2) if size <= gpus][:1]]
    parser.add_argument("--ranks", type=int, nargs="*", default=sizes)
    parser.add_argument("--in-turn", type=int, nargs="*", default=[1])
    parser.add_argument("--processes", type=int, nargs="+", default=[PROCESSES])
    parser.add_argument("--report", type=Path, help="(one rank of a start)")
    parser.add_argument("--model", help="(one rank of a start)")
    parser.add_argument("--way", choices=(AHEAD, IN_TURN), help="(one rank of a start)")
    options = parser.parse_args(arguments)
    if options.report is not None:
        start_rank(options.report, options.model, options.way, options.processes[0])
        return 0
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(write_shape(folder / options.shape, options.shape))
        for ranks in options.ranks:
            in_turn = ranks in options.in_turn
            wrong += run_size(ranks, model, in_turn, options.processes, folder)
    print("failed: " + ("; ".join(wrong) or "nothing"), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
