"""`tpdet bench kernels`: the CPU matrix product beside `torch.mm`, interleaved.

Rows of a results file: the ratio is our time over torch.mm's (1.0 is equal, less is faster).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tpdet.kernels import ops
from tpdet.kernels.cpu import threads
from tpdet.tools.measurement.rows import BenchRow, keep, print_line
from tpdet.tools.worlds.machine import Machine

_ROUNDS = 15


def gemm_rows(size: int, rows: tuple[int, ...]) -> list[BenchRow]:
    """Milliseconds of [M, size] x [size, size] for each M, ours and torch.mm's, medians."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, size, generator=generator)
    case: dict[str, Any] = {
        "case": "gemm",
        "dtype": "float32",
        "mode": f"{size}x{size}",
        "unit": "ms",
    }
    timed = []
    for count in rows:
        x = torch.randn(count, size, generator=generator)
        ours, peer = _interleaved(
            partial(ops.column_gemm, x, weight), partial(torch.mm, x, weight.t())
        )
        timed.append(BenchRow(batch=count, value=ours, **case).beside("torch.mm", peer))
    return timed


def _interleaved(
    ours: Callable[[], torch.Tensor], peer: Callable[[], torch.Tensor]
) -> tuple[float, float]:
    """Median milliseconds of both, in turn, each with all cores in its own way."""
    cores = len(os.sched_getaffinity(0))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for index, function in enumerate((ours, peer)):
            threads.configure(cores)
            torch.set_num_threads(1 if index == 0 else cores)
            function()
            begin = time.perf_counter()
            function()
            times[index].append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def kernels_command(options: argparse.Namespace) -> int:
    """Print the rows; append them to `--output` if one is named."""
    rows = gemm_rows(options.size, (1, 16, 256))
    for row in rows:
        print(
            f"M={row.batch:4d}  ours {row.value:8.2f} ms  torch.mm {row.peer_value:8.2f} "
            f"ms  ratio {row.ratio:.2f}"
        )
    print_line(keep("kernels", Machine(), rows, options.output), options.json)
    return 0
