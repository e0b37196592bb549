"""Ranks of one process that take turns at the exchange kernels, phase by phase; none has to wait.

Ordinary tensors stand for the peers' memory.
"""

from types import SimpleNamespace

import torch

from tpdet.comm.exchange.peer_memory import PeerTensor
from tpdet.comm.exchange.slot_layout import FLAGS, SlotLayout
from tpdet.kernels import order
from tpdet.kernels.cuda.exchange.arguments import Peers, Phases
from tpdet.kernels.cuda.exchange.direct import run_two_shot_direct
from tpdet.kernels.cuda.exchange.one_shot import run_one_shot
from tpdet.kernels.cuda.exchange.spread import run_two_shot_spread
from tpdet.kernels.cuda.exchange.two_shot import run_two_shot
from tpdet.kernels.cuda.pointwise import finish
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import PartialSums, relative_roots, whole_sum

LEAVES, EPS = 8, 1e-6


def draw(*shape, seed=0, kind="normal"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if kind == "heavy":
        return x * (2.0 * torch.randn(*shape, generator=generator)).exp()
    if kind == "cancelling":
        x[..., 1::2] = -x[..., 0::2] * (1 + 1e-3)
    return x * 1e-20 if kind == "tiny" else x


def only(phase):
    """A launch of one phase."""
    return Phases(**{name: name == phase for name in Phases._fields})


class Host:
    """Ranks that take turns over one layout, for rows of `hidden` values."""

    wide, kind, behind, normed = False, "rms", False, True
    """Whether a norm's weight is fp32, whatever dtype its rows have; the norms' kind; whether one
    stands behind the block, and one before the next."""

    def __init__(self, name, ranks, hidden, dtype, one_shot_rows=8, rows=64, programs=3, tile=None):
        self.plan = order.fold_plan(name, LEAVES, ranks)
        self.tree = order.fold_tree(name, LEAVES)
        self.ranks, self.hidden, self.dtype = ranks, hidden, dtype
        self.layout = SlotLayout(
            ranks, self.plan.slots, rows, hidden, dtype, one_shot_rows, direct_rows=1
        )
        self.epoch = 0
        self.memory = [self._memory() for _ in range(ranks)]
        table = torch.tensor([words.data_ptr() for words in self.memory])
        self.peers = [
            [
                Peers(
                    rank,
                    table,
                    torch.zeros(2, dtype=torch.int64),
                    torch.zeros(2, dtype=torch.int64),
                    programs,
                    tile=tile,
                    live=False,
                )
                for rank in range(ranks)
            ]
            for _ in range(2)
        ]

    def fold(self, name, empty):
        """Fold without these leaves from now on; the slots stay as they are."""
        self.plan = order.fold_plan(name, LEAVES, self.ranks, empty)
        ((self.tree,),) = order.fold_plan(name, LEAVES, 1, empty).roots

    def _memory(self):
        words = torch.full((self.layout.bytes // 4,), -1, dtype=torch.int32)
        words[self.layout.flag_start // 4 :] = 0
        assert words.data_ptr() % 16 == 0
        return words

    def armed(self):
        return all((m[: self.layout.flag_start // 4] == -1).all() for m in self.memory)

    def sums(self, leaves, rank, folded):
        sent = self.plan.roots[rank]
        mine = leaves[[leaf for root in sent for leaf in order.operands(root)]]
        roots = relative_roots(sent)
        if not folded:
            return PartialSums(mine, roots)
        values = [order.evaluate(root, mine.__getitem__, torch.add) for root in roots]
        return PartialSums(torch.stack(values), tuple(range(len(roots))))

    def exchange(self, leaves, residual, weight, two_shot, folded=False, absent=None):
        """(h, y) of every rank; rank `absent` pushes nothing."""
        layout, found = self.layout, []
        for _ in range(self.ranks):
            h = torch.full_like(residual, float("nan"))
            found.append((h, torch.full_like(h, float("nan"), dtype=self.dtype)))
        two, one = (layout.roots, layout.finished), layout.one_shot
        for phase in ("push", "fold", "take") if two_shot else ("push", "fold"):
            for rank in range(self.ranks):
                if phase == "push" and rank == absent:
                    continue
                sums = self.sums(leaves, rank, folded)
                many = run_two_shot_spread if two_shot == "spread" else run_two_shot
                run, slots = (many, two) if two_shot else (run_one_shot, one)
                peers = self.peers[int(bool(two_shot))][rank]
                given = sums, self.finish(residual, weight), found[rank], self.plan, peers, slots
                run(*given, only(phase))
        return found

    def direct(self, leaves, residual, weight, folded=False):
        """(h, y) of every rank by the exchange that pushes y to where it is read."""
        layout, size, self.epoch = self.layout, self.dtype.itemsize, self.epoch + 1
        begin = layout.direct_start + self.epoch % 2 * layout.piece_rows * self.hidden * size
        hidden = [torch.full_like(residual, float("nan")) for _ in range(self.ranks)]
        for phase in ("push", "fold", "take"):
            for rank in range(self.ranks):
                run_two_shot_direct(
                    self.sums(leaves, rank, folded),
                    self.finish(residual, weight),
                    hidden[rank],
                    self.plan,
                    self.peers[1][rank],
                    layout.roots,
                    layout.flags,
                    begin // size,
                    only(phase),
                )
        words = [memory[begin // 4 :][: residual.numel() * size // 4] for memory in self.memory]
        return list(
            zip(hidden, (w.view(self.dtype).view(residual.shape) for w in words), strict=True)
        )

    def flags(self, rank):
        start = self.layout.flag_start // 4
        return self.memory[rank][start : start + self.ranks * FLAGS].view(self.ranks, FLAGS)

    def expected(self, leaves, residual, weight):
        total = order.evaluate(self.tree, leaves.__getitem__, torch.add)
        return finish.fold_and_norm(whole_sum(total), self.finish(residual, weight))

    def finish(self, residual, weight):
        norm = Norm(weight, EPS, self.kind, self.dtype)
        behind = Norm(weight.flip(-1), EPS, self.kind, self.dtype) if self.behind else None
        return Finish(residual, norm if self.normed else None, behind)


def inputs(host, rows, seed, kind="normal"):
    """Leaf sums, a residual stream in fp32, a norm's weight."""
    leaves = draw(LEAVES, rows, host.hidden, seed=seed, kind=kind)
    residual = draw(rows, host.hidden, seed=seed + 1)
    shape = (2, host.hidden) if host.kind == "layer" else (host.hidden,)
    weight = draw(*shape, seed=seed + 2)
    return leaves, residual, weight if host.wide else weight.to(host.dtype)


class FakeMemory:
    """What an exchange needs of peer memory, for ranks of one process that take turns."""

    multiprocessors = 3
    device = torch.device("cpu")

    def __init__(self, rank, size):
        self.world = SimpleNamespace(rank=rank, size=size, timeout=1.0)

    def allocate(self, shape, dtype):
        return PeerTensor(torch.zeros(shape, dtype=dtype), torch.zeros(self.world.size).long())

    def host_words(self, count):
        return torch.zeros(count, dtype=torch.int64)

    def settle(self):
        pass
