"""The kernel that pushes owned rows of the stream, in Triton's interpreter: ranks take turns."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tests.lib.kernels.owned_rows import owned_rows
from tests.lib.kernels.peer_host import FakeMemory, draw, only
from tests.lib.some_slow import some_slow
from tpdet.comm.exchange import peer
from tpdet.comm.exchange.peer import PeerExchange
from tpdet.comm.exchange.peer_carrier import PeerCarrier
from tpdet.kernels import order
from tpdet.kernels.cuda.exchange import owned_rows as peer_owned

HIDDEN = 48


class Memory(FakeMemory):
    """Remembers what was allocated, and which kinds of exchanges there are."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.parts, self.kinds = [], []

    def allocate(self, shape, dtype):
        self.parts.append(super().allocate(shape, dtype))
        return self.parts[-1]


class Host:
    """Ranks with an exchange each, as the engine makes it, of which each owns some rows."""

    def __init__(self, ranks):
        plan = order.fold_plan("tree", 8, ranks)
        self.memories = [Memory(rank, ranks) for rank in range(ranks)]
        plain = PeerCarrier.peers

        def looking_once(carrier, addresses):
            found = replace(plain(carrier, addresses), live=False)
            carrier.memory.kinds.append(found)
            return found

        sizes = 300, HIDDEN, torch.bfloat16, 4
        with mock.patch.object(PeerCarrier, "peers", looking_once):
            self.made = [
                PeerExchange(plan, memory, *sizes, piece_rows=120) for memory in self.memories
            ]
        self.shared = [memory.parts[-1] for memory in self.memories]
        addresses = torch.tensor([each.own.data_ptr() for each in self.shared])
        for each in self.shared:
            each.addresses.copy_(addresses)
        self.kinds = [memory.kinds[-1] for memory in self.memories]

    def owned(self, rank, whole, parts):
        """The stream as exchanges leave it on a rank: NaN in the rows of others."""
        mine, first = torch.full_like(whole, float("nan")), 0
        for rows in parts:
            for piece in owned_rows(self.made[rank], rows, rank, len(self.made)):
                part = slice(first + piece.start, first + piece.stop)
                mine[part] = whole[part]
            first += rows
        return mine

    def stream_rows(self, whole, numbers, parts, absent=None):
        """The rows on every rank; rank `absent` pushes nothing."""
        found, calls = [], []
        with mock.patch.object(
            peer_owned, "run_push_owned_rows", lambda *given: calls.append(given)
        ):
            for rank, each in enumerate(self.made):
                mine = self.owned(rank, whole, parts)
                found.append(each.stream_rows(mine, numbers, parts))
        launches = len(calls) // len(self.made)
        for launch in range(launches):
            for phase in ("push", "take"):
                for rank in range(len(self.made)):
                    if phase == "take" or rank != absent:
                        call = calls[rank * launches + launch]
                        peer_owned.run_push_owned_rows(*call, only(phase))
        return found

    def armed(self):
        end = self.made[0].layout.flag_start // 4
        return all((each.own[:end] == -1).all() for each in self.shared)


@pytest.mark.parametrize("ranks", some_slow([4], [2, 4, 8]))
def test_every_rank_gets_the_rows_of_their_owners(ranks, monkeypatch):
    """Steps have one micro-batch or two, in pieces and shares that end anywhere, and few rows."""
    monkeypatch.setattr(peer, "STREAM_ROWS", 5)
    host, turns = Host(ranks), 0
    for seed, (parts, count) in enumerate((((3,), 3), ((128, 93), 12), ((256, 7), 1), ((299,), 5))):
        rows = sum(parts)
        whole = draw(rows, HIDDEN, seed=seed, kind="heavy")
        numbers = (torch.arange(count) * 37 - 1 + (parts[0] if count == 12 else 0)) % rows
        turns += -(-count // 5)
        for mine in host.stream_rows(whole, numbers, parts):
            assert_same_bits(mine, whole[numbers], f"{parts}, {count} rows")
        assert host.armed(), "words were left behind"
    assert all(kind.counter.tolist() == [turns, 0] for kind in host.kinds)
    empty = torch.empty(0, dtype=torch.int64)
    assert all(len(mine) == 0 for mine in host.stream_rows(whole, empty, parts))


def test_rows_that_have_not_come_are_seen():
    """Negative control: a kernel that looks once finds no rows of a rank that pushed none."""
    host, whole = Host(2), draw(100, HIDDEN, seed=1)
    first, second = host.stream_rows(whole, torch.tensor([2, 99]), (100,), absent=1)
    assert first[1].isnan().all() and not first[0].isnan().any()
    assert not second[0].isnan().any()  # its own row is pushed by the half that it left out


def test_what_does_not_fit_is_refused():
    host, numbers, h = Host(2), torch.zeros(1, dtype=torch.int64), torch.zeros(9, HIDDEN)
    of = host.kinds[0], host.made[0].layout.stream
    with pytest.raises(ValueError, match="one or two"):
        peer_owned.run_push_owned_rows(h, numbers, h[:1], ((3, 3),) * 3, *of)
    with pytest.raises(ValueError, match="a buffer has"):
        many = torch.zeros(500, dtype=torch.int64)
        peer_owned.run_push_owned_rows(h, many, torch.zeros(500, HIDDEN), ((9, 9),), *of)
