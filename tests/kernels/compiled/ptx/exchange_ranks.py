"""Ranks with the exchanges of an engine, whose kernels run on a `Machine` with their own memory."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
import triton
import triton.language as tl

from tests.kernels.compiled.ptx.launches import launching_on
from tests.kernels.compiled.ptx.machine import Machine
from tests.kernels.compiled.ptx.memory import ARMED, COUNTER, FLAG, PLAIN, TAGGED
from tests.lib.bits import assert_same_bits
from tests.lib.kernels.owned_rows import owned_rows
from tests.lib.kernels.peer_host import EPS, LEAVES, draw
from tpdet.comm.exchange.peer import PeerExchange
from tpdet.comm.exchange.peer_carrier import PeerCarrier
from tpdet.comm.exchange.peer_columns import PeerColumns
from tpdet.comm.exchange.peer_memory import PeerTensor
from tpdet.comm.exchange.rows import PeerRows, first_rows
from tpdet.kernels import order
from tpdet.kernels.cpu.pointwise.finish import fold_and_norm
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import PartialSums, relative_roots, whole_sum

LONG = 1e9  # seconds: no peer is taken for lost
HIDDEN, WARPS = 128, 2
READ_BLOCK = tl.constexpr(2048)


@triton.jit
def read_rows(rows, out, COUNT: tl.constexpr, DEPENDENT: tl.constexpr):
    """Stands for whatever reads an exchange's rows: rows [COUNT] -> out, fp32."""
    await_earlier(DEPENDENT)
    at = tl.program_id(0) * READ_BLOCK + tl.arange(0, READ_BLOCK)
    tl.store(out + at, tl.load(rows + at, mask=at < COUNT), mask=at < COUNT)


class SharedMemory:
    """A rank's part of memory that all ranks address."""

    device = torch.device("cpu")

    def __init__(self, rank, size, programs):
        self.world = SimpleNamespace(rank=rank, size=size, timeout=LONG)
        self.multiprocessors, self.parts, self.kinds = programs, [], []

    def allocate(self, shape, dtype):
        addresses = torch.zeros(self.world.size, dtype=torch.int64)
        self.parts.append(PeerTensor(torch.zeros(shape, dtype=dtype), addresses))
        return self.parts[-1]

    def host_words(self, count):
        return torch.zeros(count, dtype=torch.int64)

    def settle(self):
        """All ranks are made one after the other, and nothing runs meanwhile."""


class Ranks:
    """Ranks of one machine; each has what `make(memory)` makes, of a carrier and others.

    change: of every kernel's PTX.
    """

    def __init__(self, size, seed, programs=2, change=None, **of_machine):
        self.machine, self.size = Machine(size, seed, **of_machine), size
        self.change = change or (lambda ptx: ptx)
        self.memories = [SharedMemory(rank, size, programs) for rank in range(size)]
        plain = PeerCarrier.peers

        def noted(carrier, addresses):
            found = replace(plain(carrier, addresses), warps=WARPS)
            carrier.memory.kinds.append(found)
            return found

        with mock.patch.object(PeerCarrier, "peers", noted):
            self.made = [self.make(memory) for memory in self.memories]
        for same in zip(*(memory.parts for memory in self.memories), strict=True):
            addresses = torch.tensor([part.own.data_ptr() for part in same])
            for part in same:
                part.addresses.copy_(addresses)
        for rank, memory in enumerate(self.memories):
            for peers in memory.kinds:
                self.add(peers.counter, COUNTER, rank, "a counter")
                self.add(peers.control, COUNTER, rank, "control words")
            slots, words = (part.own for part in memory.parts)
            self.add(slots, TAGGED, rank, "slots of the all-gather")
            self.describe(self.made[rank], words, rank)
        self.expected = []

    def add(self, tensor, kind, rank, name, first=0, end=None):
        """Bytes [first, end) of a tensor are memory of a kind."""
        end = tensor.nbytes if end is None else end
        self.machine.memory.add(tensor.data_ptr() + first, end - first, kind, rank, name)

    def each(self, work):
        """What `work(made, rank)` returns of every rank; its launches go to the rank's stream."""
        found = []
        for rank, made in enumerate(self.made):
            with launching_on(self.machine, rank, self.change):
                found.append(work(made, rank))
        return found

    def expect(self, what, wanted, found):
        """Once all has run, each of `found` has these bits."""
        self.expected += [(what, wanted, each) for each in found]

    def finish(self):
        """Run all launches and compare bits."""
        self.machine.finish()
        for what, wanted, found in self.expected:
            assert_same_bits(found, wanted, what)
        self.expected = []


class Folds(Ranks):
    """Exchanges of sums in all kinds, rows of the stream, and small payloads.

    A step's rows choose its kind: `rows_of`.
    """

    def __init__(self, size, seed, name="tree", dtype=torch.bfloat16, hidden=HIDDEN, **more):
        self.name, self.dtype, self.hidden = name, dtype, hidden
        self.plan = order.fold_plan(name, LEAVES, size)
        super().__init__(size, seed, **more)

    def rows_of(self, kind):
        """Rows of a step of this kind, few; of a share, the last rank has fewer."""
        size = self.size
        return {"one": size - 1, "spread": size, "two": 2 * size - 1, "direct": 3 * size - 1}[kind]

    def make(self, memory):
        direct = self.rows_of("direct")
        made = PeerExchange(self.plan, memory, 32, self.hidden, self.dtype, direct_rows=direct)
        made.layout.one_shot_rows, made.spread_rows = self.rows_of("one"), self.rows_of("spread")
        return made

    def describe(self, made, words, rank):
        layout = made.layout
        self.add(words, ARMED, rank, "the slots", 0, layout.flag_start)
        self.add(words, FLAG, rank, "the flags", layout.flag_start, layout.direct_start)
        self.add(words, PLAIN, rank, "finished rows", layout.direct_start, layout.bytes)

    def fold(self, kind, seed):
        """Every rank's exchange of sums, and a kernel that reads its rows."""
        rows = self.rows_of(kind)
        leaves = draw(LEAVES, rows, self.hidden, seed=seed)
        residual = draw(rows, self.hidden, seed=seed + 1)
        finish = Finish(residual, Norm(draw(self.hidden, seed=seed + 2), EPS, rows=self.dtype))
        tree = order.fold_tree(self.name, LEAVES)
        h, y = fold_and_norm(whole_sum(order.evaluate(tree, leaves.__getitem__, torch.add)), finish)

        def run(made, rank):
            sent = self.plan.roots[rank]
            mine = leaves[[leaf for root in sent for leaf in order.operands(root)]]
            found, normed = made.fold_and_norm(PartialSums(mine, relative_roots(sent)), finish)
            out = torch.empty_like(normed)
            grid = (cdiv(out.numel(), READ_BLOCK.value),)
            read_rows[grid](normed, out, COUNT=out.numel(), **dependent_launch(out.device))
            return found, out

        ran = self.each(run)
        self.expect(f"y by {kind}", y, [out for _, out in ran])
        for rank, (found, _) in enumerate(ran):
            for part in owned_rows(self.made[rank], rows, rank, self.size):
                own = slice(part.start, part.stop)
                self.expect(f"h by {kind}", h[own], [found[own]])

    def stream_rows(self, count, seed):
        """Some rows of a step of many, pushed by their owners."""
        rows = self.rows_of("direct")
        whole, numbers = draw(rows, self.hidden, seed=seed), torch.arange(count) * 7 % rows
        found = self.each(lambda made, _: made.stream_rows(whole, numbers, (rows,)))
        self.expect("rows of the stream", whole[numbers], found)

    def gather(self, words, seed):
        """A small payload of every rank."""
        gather_payloads(self, words, seed, lambda made: made.carrier)


def gather_payloads(ranks, words, seed, carrier_of):
    """An all-gather of int32 words, any bits."""
    generator = torch.Generator().manual_seed(seed)
    low, high = -(2**31), 2**31
    sent = torch.randint(low, high, (ranks.size, words), generator=generator).int()
    sent[:, 0] = -1
    found = ranks.each(lambda made, rank: carrier_of(made).all_gather(sent[rank]))
    ranks.expect("gathered words", sent, found)


class Columns(Ranks):
    """Exchanges of columns, with and without the norm; experts' exchanges launch the same."""

    dtype = torch.bfloat16

    def make(self, memory):
        return PeerColumns(memory, 32, (HIDDEN, HIDDEN), self.dtype)

    def describe(self, _, words, rank):
        self.add(words, ARMED, rank, "the slots")

    def gather(self, rows, seed):
        """Columns of all ranks side by side."""
        whole = draw(rows, HIDDEN, seed=seed).to(self.dtype)
        parts = whole.chunk(self.size, dim=1)
        found = self.each(lambda made, rank: made.gather_columns(parts[rank]))
        self.expect("gathered columns", whole, found)

    def norm(self, rows, seed):
        """The same with the residual and the norm."""
        whole = draw(rows, HIDDEN, seed=seed).to(self.dtype)
        norm = Norm(draw(HIDDEN, seed=seed + 2), EPS, rows=self.dtype)
        finish = Finish(draw(rows, HIDDEN, seed=seed + 1), norm)
        h, y = fold_and_norm(whole_sum(whole.float()), finish)
        parts = whole.chunk(self.size, dim=1)
        ran = self.each(lambda made, rank: made.gather_and_norm(parts[rank], finish))
        self.expect("h of gathered columns", h, [found for found, _ in ran])
        self.expect("y of gathered columns", y, [found for _, found in ran])


class Rows(Ranks):
    """Rows cut by columns become whole rows: logits, for the shares of the sampler."""

    columns = 96

    def make(self, memory):
        carrier = PeerCarrier(memory)
        return SimpleNamespace(carrier=carrier, rows=PeerRows(carrier, self.columns, 16))

    def describe(self, _, words, rank):
        self.add(words, ARMED, rank, "the slots")

    def exchange(self, rows, seed):
        """Every rank's share of whole rows, and what the ranks then tell each other."""
        whole = draw(rows, self.columns * self.size, seed=seed)
        parts = whole.chunk(self.size, dim=1)
        found = self.each(lambda made, rank: made.rows.whole_rows(parts[rank]))
        for rank, first in enumerate(first_rows(rows, self.size)):
            self.expect("rows", whole[first : first + len(found[rank])], [found[rank]])
        gather_payloads(self, rows, seed, lambda made: made.carrier)
