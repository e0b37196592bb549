"""Columns gathered over peer memory on several GPUs: bits against the world's, then times.

    torchrun --nproc-per-node 4 -m tests.gpu.exchange.columns    # or 2; exits 1 if anything failed

Every rank checks and rank 0 reports. Times are microseconds an exchange in a graph of many, the
slowest rank's, beside NCCL's all-gather of the same columns. The last check loses a peer.
"""

import os
import sys
import time

import torch

from tests.gpu.exchange.peer import attempt, finish, keep
from tests.gpu.lib.checks import draw, same
from tpdet.comm.device import open_world
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.comm.exchange.peer_columns import PeerColumns
from tpdet.comm.exchange.peer_memory import open_peer_memory
from tpdet.errors import PeerLostError
from tpdet.kernels import order
from tpdet.kernels.inputs.norm import Norm

EPS = 1e-6
ROWS = (1, 2, 5, 16, 64, 131, 132, 133, 256, 1000, 2048, 4096, 8192)
WIDTHS = {"o": 4096, "down": 12288}
HIDDEN = 4096


class Case:
    """Both exchanges, and inputs that are equal on every rank."""

    def __init__(self, world, rows, dtype=torch.bfloat16, hidden=HIDDEN, widest=12288, **limits):
        self.world, self.dtype, self.hidden = world, dtype, hidden
        plan = order.fold_plan("pairs", 8, world.size)
        self.memory = open_peer_memory(world)
        assert self.memory is not None, "these GPUs have no peer memory"
        widths = widest, hidden
        self.exchange = PeerColumns(self.memory, rows, widths, dtype, **limits)
        self.plain = GatherExchange(plan, world)
        self.weight = draw(hidden, dtype=dtype, seed=99)

    def mine(self, whole):
        return whole.chunk(self.world.size, dim=1)[self.world.rank].contiguous()

    def check(self, rows, width, seed, wrong):
        whole = draw(rows, width, dtype=self.dtype, kind="heavy", seed=seed)
        found = self.exchange.gather_columns(self.mine(whole))
        keep(wrong, same, found, whole, f"columns of {rows} x {width}")
        stream = draw(rows, self.hidden, dtype=self.dtype, seed=seed + 1)
        residual = draw(rows, self.hidden, dtype=torch.float32, seed=seed + 2)
        sent = self.mine(stream), residual, Norm(self.weight, EPS)
        wanted = self.plain.gather_and_norm(*sent)
        for name, one, other in zip(
            "hy", self.exchange.gather_and_norm(*sent), wanted, strict=True
        ):
            keep(wrong, same, one, other, f"{name} of {rows} rows")

    def armed(self, wrong):
        torch.cuda.synchronize()
        self.world.barrier()
        if not bool((self.exchange._buffers.own == -1).all()):
            wrong.append("slots were left behind")
        self.exchange.carrier.report()
        torch.cuda.synchronize()
        self.exchange.carrier.check()


def check_sizes(world, rows_of=ROWS, **options):
    case, wrong = Case(world, max(rows_of), **options), []
    for seed, rows in enumerate(rows_of):
        for width in (case.hidden, options.get("widest", 12288)):
            case.check(rows, width, 8 * seed, wrong)
    case.armed(wrong)
    finish(wrong)


class Captured:
    """A graph of a layer's four exchanges and one more, so that the buffers change places."""

    def __init__(self, case, rows):
        self.case = case
        self.inputs = [draw(rows, width, seed=width) for width in WIDTHS.values()]
        self.stream = draw(rows, HIDDEN, seed=1)
        self.residual = draw(rows, HIDDEN, dtype=torch.float32, seed=2)
        self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.found = self.run()

    def run(self):
        case, found, residual = self.case, [], self.residual
        for x in self.inputs:
            found.append(case.exchange.gather_columns(case.mine(x)))
            sent = case.mine(self.stream), residual, Norm(case.weight, EPS)
            residual, y = case.exchange.gather_and_norm(*sent)
            found += [residual, y]
        return [*found, case.exchange.gather_columns(case.mine(self.inputs[0]))]

    def check(self, turn, eager, wrong):
        for index, each in enumerate((*self.inputs, self.stream, self.residual)):
            each.copy_(draw(*each.shape, dtype=each.dtype, seed=8 * turn + index))
        if eager:
            found = self.run()
        else:
            self.graph.replay()
            found = self.found
        residual, wanted = self.residual, []
        for x in self.inputs:
            sent = self.case.mine(self.stream), residual, Norm(self.case.weight, EPS)
            residual, y = self.case.plain.gather_and_norm(*sent)
            wanted += [x, residual, y]
        for index, (one, other) in enumerate(zip(found, [*wanted, self.inputs[0]], strict=True)):
            keep(wrong, same, one, other, f"exchange result {index} of turn {turn}, eager {eager}")


def check_graphs(world):
    """Two graphs and eager exchanges in turn, 60 times, inputs changing."""
    case, wrong = Case(world, 512), []
    captured = [Captured(case, rows) for rows in (5, 300)]
    for turn in range(60):
        captured[(turn // 2) % 2].check(turn, turn % 5 == 3, wrong)
    case.armed(wrong)
    finish(wrong)


def check_lost(world):
    """The last rank stays away: the others end in time and name it."""
    case = Case(world, 512)
    captured = [Captured(case, rows) for rows in (5, 300)]
    case.memory.settle()
    case.exchange.carrier.set_timeout(1.5)
    start, named = time.monotonic(), None
    if world.rank < world.size - 1:
        for each in captured:
            for _ in range(5):
                each.graph.replay()
        case.exchange.carrier.report()
        torch.cuda.synchronize()
        try:
            case.exchange.carrier.check()
        except PeerLostError as error:
            named = str(error)
    taken = time.monotonic() - start
    world.barrier()
    if world.rank < world.size - 1:
        assert named and f"for rank {world.size - 1} " in named, f"named: {named}"
        assert 1.4 < taken < 6.0, f"it took {taken:.1f} s"
        return f"it took {taken:.1f} s: {named}"
    return ""


def print_times(world):
    case, ranks = Case(world, 8192), world.size
    for rows in (1, 8, 16, 64, 256, 1024, 4096, 8192):
        figures = []
        for name, width in (*WIDTHS.items(), ("output + norm", HIDDEN)):
            x = draw(rows, width // ranks, seed=rows)
            sent = x, draw(rows, HIDDEN, seed=1), Norm(case.weight, EPS)
            if name == "output + norm":
                runs = [lambda e, s=sent: e.gather_and_norm(*s)] * 2
            else:
                runs = [lambda e, x=x: e.gather_columns(x)] * 2
            ours, plain = (
                _time(world, case, run, exchange, rows)
                for run, exchange in zip(runs, (case.exchange, case.plain), strict=True)
            )
            floor = rows * width * 2 * (ranks - 1) / ranks / 450e9 * 1e6
            figures.append(f"{name}: floor {floor:.1f}, peer {ours:.1f}, gather {plain:.1f}")
        if world.rank == 0:
            print(f"{rows:5d} rows | " + " | ".join(figures), flush=True)
    case.armed([])
    size = 2 * case.exchange.piece_rows * max(WIDTHS.values()) * case.dtype.itemsize
    return f"{size / 2**20:.0f} MiB of buffers a rank"


def _time(world, case, run, exchange, rows):
    """Microseconds a call, the median of 7 replays, the slowest rank's."""
    repeats = 40 if rows <= 256 else 8
    run(exchange)
    torch.cuda.synchronize()
    world.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            run(exchange)
    taken = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        world.barrier()
        case.exchange.carrier.all_gather(case.weight[:2])  # the GPUs leave it together
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / repeats * 1e3)
    median = torch.tensor(sorted(taken[1:])[3], device="cuda")
    return float(world.all_gather(median).amax())


def main():
    world = open_world("cuda", 120.0)
    few = (1, 3, 64, 300)
    good = [
        attempt(world, "bf16, 4096 and 12288", check_sizes),
        attempt(world, "pieces", check_sizes, (1, 700, 1801), piece_rows=600),
        attempt(
            world, "fp16, 1024", check_sizes, few, dtype=torch.float16, hidden=1024, widest=3072
        ),
        attempt(
            world, "fp32, 1024", check_sizes, few, dtype=torch.float32, hidden=1024, widest=3072
        ),
        attempt(world, "bf16, 8192 and 28672", check_sizes, few, hidden=8192, widest=28672),
        attempt(world, "graphs and eager in turn", check_graphs),
    ]
    if "--no-times" not in sys.argv:
        good.append(attempt(world, "times", print_times))
    good.append(attempt(world, "a lost peer", check_lost))
    if world.rank == 0:
        print("all passed" if all(good) else f"{good.count(False)} FAILED", flush=True)
    sys.stdout.flush()
    os._exit(0 if all(good) else 1)  # the lost peer's exchange is broken: nothing to tidy


if __name__ == "__main__":
    main()
