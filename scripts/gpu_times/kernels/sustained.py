"""Products of prefill run for a while: what the board's power leaves of the clock.

    python -m scripts.gpu_times.kernels.sustained --output docs/results

For the shapes of Qwen3-8B at TP 1 and 8,192 rows: cuBLAS, what the shape table chooses, and, as a
control, cuBLAS on zeros, whose bits hardly change. Each runs half a second before a quarter is
measured, in turn, three times over. Figures are medians: microseconds a product, TFLOP/s, MHz of
the multiprocessors, watts of the board (NVML by torch, which needs nvidia-ml-py; an average over
about a second, so a way is seen with what ran before it). Row products of
the table have fp32 sums as their output, where cuBLAS rounds to half the bytes.
"""

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path

import torch
from msgspec import to_builtins

from tpdet.kernels import order
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm.admission import check
from tpdet.kernels.inputs.product import Product, write_roots
from tpdet.kernels.partial_sums import relative_roots
from tpdet.tools.bench.kernels.gpu import gpu_only, this_gpu
from tpdet.tools.measurement.graph_times import capture
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.measurement.rows import BenchRow, print_rows

ROWS, LEAVES, WARM, MEASURED, TURNS = 8192, 8, 0.5, 0.25, 3
CALLS = 3  # of a graph
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
ROW_PRODUCTS = ("o", "down")
PEAK = 989e12  # data-sheet bf16 FLOP/s


class Watch:
    """Clock and power every 20 ms, by a thread."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            watts = torch.cuda.power_draw() / 1000
            self.seen.append((time.perf_counter(), torch.cuda.clock_rate(), watts))

    def since(self, moment: float) -> tuple[float, float]:
        """Mean clock in MHz and power in watts since a moment of perf_counter."""
        found = [(clock, watts) for at, clock, watts in self.seen if at >= moment]
        return tuple(statistics.fmean(values) for values in zip(*found, strict=True))

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self._thread.join()


def roots_of():
    """What a rank alone sends in the default order."""
    return relative_roots(order.fold_plan(order.DEFAULT_FOLD_ORDER, LEAVES, 1).roots[0])


def product_of(name):
    """A shape as the product that a start admits."""
    n, k = SHAPES[name]
    if name in ROW_PRODUCTS:
        return Product("row", n, k // LEAVES, LEAVES, write_roots(roots_of()))
    return Product("column", n, k)


def sustain(graph, watch):
    """Microseconds, MHz and watts of a product, after a while of them."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM:
        graph.replay()
        torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    moment, replays = time.perf_counter(), 0
    first.record()
    while time.perf_counter() - moment < MEASURED:
        graph.replay()
        replays += 1
        if replays % 4 == 0:
            torch.cuda.synchronize()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e3 / replays / CALLS, *watch.since(moment)


def runs_of(name, n, k):
    """Name -> a product of ROWS rows."""
    x = torch.randn(ROWS, k, device="cuda").bfloat16()
    w = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
    zeros = [torch.zeros_like(x), torch.zeros_like(w)]
    y = torch.empty(ROWS, n, device="cuda", dtype=x.dtype)
    leaves = w.view(n, LEAVES, k // LEAVES).transpose(0, 1).contiguous()
    if name in ROW_PRODUCTS:
        ours = lambda: leaf_gemm.leaf_sums(x, leaves, roots_of())
    else:
        ours = lambda: gemm.column_gemm(x, w, None, x.dtype)
    return {
        "cuBLAS": lambda: torch.mm(x, w.T, out=y),
        "tpdet": ours,
        "cuBLAS on zeros": lambda: torch.mm(zeros[0], zeros[1].T, out=y),
    }


def rows_of(name, watch):
    """A shape's rows of results, one a way."""
    n, k = SHAPES[name]
    runs = runs_of(name, n, k)
    graphs = {way: capture(lambda _, run=run: run(), range(CALLS)) for way, run in runs.items()}
    taken = {way: [] for way in graphs}
    for _ in range(TURNS):
        for way, graph in graphs.items():
            taken[way].append(sustain(graph, watch))
    middle = lambda turns: [statistics.median(column) for column in zip(*turns, strict=True)]
    medians = {way: middle(turns) for way, turns in taken.items()}
    flops, peer = 2.0 * ROWS * n * k, medians["cuBLAS"][0]
    for way, (us, clock, watts) in medians.items():
        facts = {"TFLOP/s": round(flops / us / 1e6, 1), "MHz": round(clock), "W": round(watts)}
        yield BenchRow(
            case=f"sustained {name}",
            value=us,
            unit="us",
            model="qwen3-8b",
            dtype="bfloat16",
            mode=way,
            tp=1,
            batch=ROWS,
            floor=flops / PEAK * 1e6,
            peer="cuBLAS",
            peer_value=peer,
            ratio=us / peer,
            flops=flops,
            metrics=facts,
        )


def main(arguments: list[str]) -> int:
    """Print all times."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_times.kernels.sustained", allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, help="results file, or a folder for sustained.*")
    options = parser.parse_args(arguments)
    gpu_only("sustained")
    print(check(map(product_of, SHAPES), torch.device("cuda", 0), {"column": ROWS, "head": 1}))
    watch = Watch()
    rows = [row for name in SHAPES for row in rows_of(name, watch)]
    watch.end()
    print_rows(rows)
    if options.output is not None:
        plain = [to_builtins(row) for row in rows]
        append_run(
            options.output,
            "sustained",
            this_gpu(),
            "python -m scripts.gpu_times.kernels.sustained",
            plain,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
