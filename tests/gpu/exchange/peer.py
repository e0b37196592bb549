"""The exchange over peer memory on several GPUs: bits against the gathered form.

    torchrun --nproc-per-node 4 -m tests.gpu.exchange.peer       # or 2; exits 1 if anything failed

Every rank checks and rank 0 reports. A difference is kept until a check ends, so that no rank
leaves the others waiting. The last check loses a peer on purpose.
"""

import time

import torch

from tests.gpu.lib.checks import Differences, draw, same
from tests.gpu.lib.ranks import attempt, check_armed, check_lost, end
from tests.lib.kernels.owned_rows import owned_rows
from tpdet.comm.device import open_world
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.comm.exchange.peer import PeerExchange
from tpdet.comm.exchange.peer_memory import open_peer_memory
from tpdet.kernels import order
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import PartialSums, relative_roots

LEAVES, EPS = 8, 1e-6
ROWS = (1, 2, 3, 5, 16, 63, 64, 65, 200, 256, 257, 1000, 2048, 8192)
KINDS = ("normal", "heavy", "cancelling", "tiny")


class Case:
    """An exchange, its gathered peer, and inputs that are equal on every rank."""

    def __init__(self, world, name, hidden, dtype, rows, **limits):
        self.world, self.hidden, self.dtype = world, hidden, dtype
        self.plan = order.fold_plan(name, LEAVES, world.size)
        self.memory = open_peer_memory(world)
        assert self.memory is not None, "these GPUs have no peer memory"
        self.exchange = PeerExchange(self.plan, self.memory, rows, hidden, dtype, **limits)
        self.gather = GatherExchange(self.plan, world)
        self.weight = draw(hidden, dtype=dtype, seed=99)

    def inputs(self, rows, seed, folded):
        share = LEAVES // self.world.size
        first = self.world.rank * share
        roots = relative_roots(self.plan.roots[self.world.rank])
        values = torch.stack(
            [
                draw(
                    rows,
                    self.hidden,
                    dtype=torch.float32,
                    kind=KINDS[seed % 4],
                    seed=seed * 64 + first + leaf,
                )
                for leaf in range(share)
            ]
        )
        sums = PartialSums(values, roots)
        if folded:
            folds = [order.evaluate(root, values.__getitem__, torch.add) for root in roots]
            sums = PartialSums(torch.stack(folds), tuple(range(len(roots))))
        return sums, draw(rows, self.hidden, dtype=torch.float32, seed=seed + 7)

    def compare(self, rows, found, wanted, what, wrong):
        for mine in owned_rows(self.exchange, rows, self.world.rank, self.world.size):
            part = slice(mine.start, mine.stop)
            wrong.keep(same, found[0][part], wanted[0][part], f"h, {what}")
        wrong.keep(same, found[1], wanted[1], f"y, {what}")

    def check_armed(self):
        words = self.exchange._shared.own[: self.exchange.layout.flag_start // 4]
        check_armed(self.exchange.carrier, words)


def check_sizes(world, name, hidden, dtype, rows_of, folds=(False, True), **limits):
    """Eager exchanges of all sizes, sums of leaves and of roots, norms before and behind blocks."""
    case, wrong = Case(world, name, hidden, dtype, max(rows_of), **limits), Differences()
    norm = Norm(case.weight, EPS)
    for seed, rows in enumerate(rows_of):
        for folded in folds:
            sums, residual = case.inputs(rows, seed, folded)
            for norms in ((norm, None), (norm, norm), (None, norm)):
                wanted = case.gather.fold_and_norm(sums, Finish(residual, *norms))
                found = case.exchange.fold_and_norm(sums, Finish(residual, *norms))
                case.compare(rows, found, wanted, f"{rows} rows, roots {sums.roots}", wrong)
    wrong.keep(case.check_armed)
    return wrong.finish()


class Captured:
    """A graph of three exchanges of one size: an odd number, so the buffers change places."""

    def __init__(self, case, rows):
        self.case, self.rows = case, rows
        self.sums, self.residual = case.inputs(rows, 0, False)
        self._run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.found = self._run()

    def _run(self):
        """(Rows, h, y) of each exchange; y is kept: its memory may be another exchange's."""
        found, residual, everything = [], self.residual, slice(0, self.rows)
        for _ in range(3):
            finish = Finish(residual, Norm(self.case.weight, EPS))
            h, y = self.case.exchange.fold_and_norm(self.sums, finish)
            residual = y.float()
            found.append((everything, h, y.clone()))
        return found

    def check(self, turn, eager, wrong):
        sums, residual = self.case.inputs(self.rows, turn, False)
        self.sums.values.copy_(sums.values)
        self.residual.copy_(residual)
        if eager:
            found = self._run()
        else:
            self.graph.replay()
            found = self.found
        for index in range(3):
            wanted = self.case.gather.fold_and_norm(
                sums, Finish(residual, Norm(self.case.weight, EPS))
            )
            residual = wanted[1].float()
            what = f"exchange {index} of turn {turn}, {'eager' if eager else 'graph'}"
            for rows, *pair in found[index * len(found) // 3 : (index + 1) * len(found) // 3]:
                part = [each[rows] for each in wanted]
                self.case.compare(rows.stop - rows.start, pair, part, f"{what}, {rows}", wrong)


class Halves(Captured):
    """The same over two halves whose exchanges overlap, as in a step of many rows."""

    def _run(self):
        exchange, weight, middle = self.case.exchange, self.case.weight, self.rows // 2
        halves = slice(0, middle), slice(middle, self.rows)
        sums = [PartialSums(self.sums.values[:, rows], self.sums.roots) for rows in halves]
        beside = [self.residual[rows] for rows in halves]
        found, pending = [], {}
        for _ in range(3):
            for half, rows in enumerate(halves):
                if half in pending:
                    h, y = pending[half].result()
                    beside[half] = y.float()
                    found.append((rows, h, y.clone()))
                pending[half] = exchange.begin(sums[half], Finish(beside[half], Norm(weight, EPS)))
        for half, rows in enumerate(halves):
            h, y = pending[half].result()
            found.append((rows, h, y.clone()))
        return found


def check_graphs(world):
    """Graphs and eager exchanges in turn, 200 times, inputs changing; of every kind."""
    case, wrong = Case(world, "pairs", 4096, torch.bfloat16, 4096), Differences()
    captured = [Captured(case, rows) for rows in (5, 300, 1500)]
    captured += [Halves(case, rows) for rows in (600, 2048, 4096)]
    for turn in range(200):
        captured[(turn // 2) % len(captured)].check(turn, turn % 5 == 3, wrong)
    wrong.keep(case.check_armed)
    return wrong.finish()


def check_rows(world):
    """The embedding's rows, from every part, against the gathered table."""
    memory, wrong = open_peer_memory(world), Differences()
    for dtype, width in ((torch.bfloat16, 4096), (torch.float32, 100), (torch.float16, 8192)):
        part = memory.allocate((1000, width), dtype)
        part.own.copy_(draw(1000, width, dtype=dtype, seed=world.rank))
        memory.settle()
        whole = world.all_gather(part.own).flatten(0, 1)
        for count in (1, 7, 256, 5000):
            ids = torch.arange(count, device="cuda") * 997 % len(whole)
            wrong.keep(same, part.rows(ids), whole[ids].float(), f"{count} rows of {dtype}")
    return wrong.finish()


def check_stream_rows(world):
    """Rows of the stream, of every cut into micro-batches and pieces, after their exchanges."""
    case = Case(world, "tree", 4096, torch.bfloat16, 8192, piece_rows=3000)
    wrong = Differences()
    for seed, parts in enumerate(((4096, 4096), (1500,), (3,), (2048, 777), (200,), (8192,))):
        whole, mine = [], []
        for part, rows in enumerate(parts):
            sums, residual = case.inputs(rows, seed + part, True)
            finish = Finish(residual, Norm(case.weight, EPS))
            whole.append(case.gather.fold_and_norm(sums, finish)[0])
            mine.append(case.exchange.fold_and_norm(sums, finish)[0])
        rows, whole, mine = sum(parts), torch.cat(whole), torch.cat(mine)
        for count in (0, 1, 2, 65, 256):
            numbers = torch.arange(count, device="cuda") * 997 % rows
            found = case.exchange.stream_rows(mine, numbers, parts)
            wrong.keep(same, found, whole[numbers], f"{count} rows of {parts}")
    wrong.keep(case.check_armed)
    return wrong.finish()


def check_many_pushes(world):
    """Rows of the stream 100,000 times, ranks out of step: no warp comes to a word too late.

    One that does waits as long as for a lost peer, and nobody reports it.
    """
    case, wrong = Case(world, "tree", 4096, torch.bfloat16, 512), Differences()
    limit, numbers = 1.0, torch.arange(8, device="cuda") * 25
    whole, delay = draw(200, 4096, dtype=torch.float32, seed=5), torch.zeros(1 << 22, device="cuda")
    case.exchange.stream_rows(whole, numbers, (200,))
    case.memory.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for push in range(100):
            delay[: (push * 97 + world.rank * 1013) % 4001 << 10].mul_(0.5)
            found = case.exchange.stream_rows(whole, numbers, (200,))
    case.exchange.carrier.set_timeout(limit)
    for turn in range(25):
        case.memory.settle()
        start, replays = time.monotonic(), min(1 << turn, 50)
        for _ in range(replays):
            graph.replay()
        case.memory.settle()
        taken = time.monotonic() - start
        what = f"{replays * 100} pushes, turn {turn}: {taken:.2f} s, as long as for a lost peer"
        late = b"late" * (taken >= limit)
        if any(world.gather_bytes(late)):
            raise AssertionError(what)
    wrong.keep(same, found, whole[numbers], "rows of the last push")
    wrong.keep(case.check_armed)
    return wrong.finish()


def check_gather(world):
    """Small payloads of any bits, back to back in both buffers."""
    case, wrong = Case(world, "pairs", 1024, torch.bfloat16, 64), Differences()
    for count in (1, 2, 64, 257, 4096, 50_000):
        for turn in range(3):
            x = torch.arange(count * 2, device="cuda").view(count, 2) * (turn * 7 - 9)
            x = x * (world.rank + 1) - 1
            wrong.keep(
                exactly,
                case.exchange.carrier.all_gather(x),
                world.all_gather(x),
                f"{count} rows",
            )
    wrong.keep(case.check_armed)
    return wrong.finish()


def exactly(found, wanted, what):
    if not torch.equal(found, wanted):
        raise AssertionError(f"{what}: gathered words differ")


def check_lost_peer(world):
    """The last rank stays away from graphs of exchanges of two sizes."""
    case = Case(world, "pairs", 4096, torch.bfloat16, 512)
    captured = [Captured(case, rows) for rows in (5, 300)]
    case.memory.settle()
    return check_lost(case.exchange.carrier, [each.graph for each in captured], 10)


def main():
    world = open_world("cuda", 120.0)
    good, both = [], {"one-shot": {"one_shot_rows": 257}, "two-shot": {"one_shot_rows": 0}}
    for name in order.FOLD_ORDERS:
        for kind, limits in both.items():
            few = [rows for rows in ROWS if rows <= 257]
            sizes = few if kind == "one-shot" or name == "tree" else ROWS
            what = f"{kind}, {name}, bf16, 4096"
            good.append(
                attempt(world, what, check_sizes, name, 4096, torch.bfloat16, sizes, **limits)
            )
    pieces = {"one_shot_rows": 0, "piece_rows": 600}
    bf16 = torch.bfloat16
    good.append(attempt(world, "pieces", check_sizes, "pairs", 4096, bf16, (1000, 1801), **pieces))
    for hidden, dtype in ((1024, torch.float16), (8192, bf16), (1024, torch.float32)):
        for kind, limits in both.items():
            what, options = f"{kind}, sequential, {dtype}, {hidden}", limits | {"folds": (False,)}
            sizes = "sequential", hidden, dtype, (3, 64, 65, 257)
            good.append(attempt(world, what, check_sizes, *sizes, **options))
    good.append(attempt(world, "graphs and eager in turn", check_graphs))
    good.append(attempt(world, "embedding rows", check_rows))
    good.append(attempt(world, "rows of the stream", check_stream_rows))
    good.append(attempt(world, "many pushes of rows", check_many_pushes))
    good.append(attempt(world, "all-gather", check_gather))
    good.append(attempt(world, "a lost peer", check_lost_peer))
    end(world, good)


if __name__ == "__main__":
    main()
