"""Columns gathered over peer memory on several GPUs: bits against the world's.

    torchrun --nproc-per-node 4 -m tests.gpu.exchange.columns    # or 2; exits 1 if anything failed

Every rank checks and rank 0 reports. The last check loses a peer.
"""

import torch

from tests.gpu.lib.checks import Differences, draw, same
from tests.gpu.lib.ranks import attempt, check_armed, check_lost, end
from tpdet.comm.device import open_world
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.comm.exchange.peer_columns import PeerColumns
from tpdet.comm.exchange.peer_memory import open_peer_memory
from tpdet.kernels import order
from tpdet.kernels.inputs.norm import Finish, Norm

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
        wrong.keep(same, found, whole, f"columns of {rows} x {width}")
        stream = draw(rows, self.hidden, dtype=self.dtype, seed=seed + 1)
        residual = draw(rows, self.hidden, dtype=torch.float32, seed=seed + 2)
        sent = self.mine(stream), Finish(residual, Norm(self.weight, EPS))
        wanted = self.plain.gather_and_norm(*sent)
        for name, one, other in zip(
            "hy", self.exchange.gather_and_norm(*sent), wanted, strict=True
        ):
            wrong.keep(same, one, other, f"{name} of {rows} rows")

    def check_armed(self):
        check_armed(self.exchange.carrier, self.exchange._buffers.own)


def check_sizes(world, rows_of=ROWS, **options):
    case, wrong = Case(world, max(rows_of), **options), Differences()
    for seed, rows in enumerate(rows_of):
        for width in (case.hidden, options.get("widest", 12288)):
            case.check(rows, width, 8 * seed, wrong)
    wrong.keep(case.check_armed)
    return wrong.finish()


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
            sent = case.mine(self.stream), Finish(residual, Norm(case.weight, EPS))
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
            sent = self.case.mine(self.stream), Finish(residual, Norm(self.case.weight, EPS))
            residual, y = self.case.plain.gather_and_norm(*sent)
            wanted += [x, residual, y]
        for index, (one, other) in enumerate(zip(found, [*wanted, self.inputs[0]], strict=True)):
            wrong.keep(same, one, other, f"exchange result {index} of turn {turn}, eager {eager}")


def check_graphs(world):
    """Two graphs and eager exchanges in turn, 60 times, inputs changing."""
    case, wrong = Case(world, 512), Differences()
    captured = [Captured(case, rows) for rows in (5, 300)]
    for turn in range(60):
        captured[(turn // 2) % 2].check(turn, turn % 5 == 3, wrong)
    wrong.keep(case.check_armed)
    return wrong.finish()


def check_lost_peer(world):
    """The last rank stays away from graphs of exchanges of two sizes."""
    case = Case(world, 512)
    captured = [Captured(case, rows) for rows in (5, 300)]
    case.memory.settle()
    return check_lost(case.exchange.carrier, [each.graph for each in captured], 5)


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
    good.append(attempt(world, "a lost peer", check_lost_peer))
    end(world, good)


if __name__ == "__main__":
    main()
