"""Times of columns gathered over peer memory on several GPUs, beside NCCL's all-gather of them.

    torchrun --nproc-per-node 4 -m scripts.gpu_times.exchange.columns    # or 2

Microseconds an exchange in a graph of many, the slowest rank's.
"""

import sys
from functools import partial

import torch

from scripts.gpu_times.graphs import repeated, slowest_medians
from scripts.gpu_times.parts import on_ranks
from tests.gpu.exchange.columns import EPS, HIDDEN, WIDTHS, Case
from tests.gpu.lib.checks import draw
from tests.gpu.lib.ranks import check_carrier
from tpdet.kernels.inputs.norm import Finish, Norm


def print_times(world):
    """Print a line for each number of rows; a note on the memory that it took."""
    case, ranks = Case(world, 8192), world.size
    carrier, start = case.exchange.carrier, torch.zeros(1, 8, device="cuda")
    for rows in (1, 8, 16, 64, 256, 1024, 4096, 8192):
        figures = []
        for name, width in (*WIDTHS.items(), ("output + norm", HIDDEN)):
            x = draw(rows, width // ranks, seed=rows)
            sent = x, Finish(draw(rows, HIDDEN, seed=1), Norm(case.weight, EPS))
            work = lambda e, x=x: e.gather_columns(x)
            if name == "output + norm":
                work = lambda e, s=sent: e.gather_and_norm(*s)
            ways = {"peer": case.exchange, "gather": case.plain}
            runs = {way: repeated(partial(work, exchange)) for way, exchange in ways.items()}
            taken = slowest_medians(carrier, runs, start, 40 if rows <= 256 else 8)
            each = ", ".join(f"{way} {value:.1f}" for way, value in taken.items())
            floor = rows * width * 2 * (ranks - 1) / ranks / 450e9 * 1e6
            figures.append(f"{name}: floor {floor:.1f}, {each}")
        if world.rank == 0:
            print(f"{rows:5d} rows | " + " | ".join(figures), flush=True)
    check_carrier(carrier)
    size = 2 * case.exchange.piece_rows * max(WIDTHS.values()) * case.dtype.itemsize
    return f"{size / 2**20:.0f} MiB of buffers a rank"


def main(arguments):
    """Print all times."""
    return on_ranks("exchange.columns", print_times, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
