"""The kernel that exchanges rows in Triton's interpreter; tensors stand for the peers' memory.

The ranks take turns, phase by phase; the last one, for which all is there, does both in one launch.
"""

from dataclasses import replace

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tests.lib.kernels.peer_host import FakeMemory, draw, only
from tpdet.comm.exchange.peer_carrier import PeerCarrier
from tpdet.comm.exchange.rows import first_rows, open_row_exchange, share_of
from tpdet.kernels.cuda.exchange import rows as peer_rows
from tpdet.kernels.cuda.exchange.arguments import ALL_PHASES, Buffers


class Host:
    """Ranks that take turns, each with an exchange of rows as the engine makes it."""

    def __init__(self, ranks, columns, rows):
        self.ranks, self.made = ranks, []
        for rank in range(ranks):
            carrier = PeerCarrier(FakeMemory(rank, ranks))
            self.made.append(open_row_exchange(carrier, columns, rows))
        addresses = torch.tensor([each._buffers.own.data_ptr() for each in self.made])
        for each in self.made:
            assert each._buffers.own.data_ptr() % 16 == 0
            each._peers = replace(each._peers, table=addresses, live=False)

    def whole_rows(self, whole, absent=None):
        """Of [R, ranks * W] every rank's share; rank `absent` pushes nothing."""
        found, calls, run = [], [], peer_rows.run_take_rows
        peer_rows.run_take_rows = lambda *arguments: calls.append(arguments)
        try:
            for part, each in zip(whole.chunk(self.ranks, dim=1), self.made, strict=True):
                found.append(each.whole_rows(part))
        finally:
            peer_rows.run_take_rows = run
        last = self.ranks - 1
        turns = [
            *((rank, only("push")) for rank in range(last)),
            (last, ALL_PHASES),
            *((rank, only("take")) for rank in range(last)),
        ]
        for rank, phases in turns:
            run(*calls[rank], phases=phases._replace(push=phases.push and rank != absent))
        return found

    def armed(self):
        return all((each._buffers.own == -1).all() for each in self.made)


def test_every_rank_gets_its_share_of_whole_rows():
    """Any number of rows follows any other through both buffers; fewer rows than ranks too."""
    for ranks, columns in ((2, 48), (4, 3000), (8, 16)):
        host = Host(ranks, columns, 9)
        for turn, rows in enumerate((1, 9, 3, 8, 2)):
            whole = draw(rows, columns * ranks, seed=turn, kind="heavy")
            found, share = host.whole_rows(whole), share_of(rows, ranks)
            for mine, first in zip(found, first_rows(rows, ranks), strict=True):
                assert_same_bits(mine, whole[first : first + share], f"{rows} rows, {ranks} ranks")
            assert host.armed(), "words were left behind"
        assert all(each._peers.counter.tolist() == [5, 0] for each in host.made)


def test_words_like_those_that_have_not_come_stay_nan():
    host = Host(2, 64, 4)
    whole = draw(4, 128, seed=1)
    whole.view(torch.int32)[1, 3] = -1
    whole.view(torch.int32)[2, 100] = -1
    rows = torch.cat(host.whole_rows(whole))
    assert torch.equal(rows.isnan(), whole.isnan())
    assert_same_bits(rows[[0, 3]], whole[[0, 3]])
    assert host.armed()


def test_what_has_not_come_is_seen():
    """Negative control: a kernel that looks once finds no columns of a rank that pushed none."""
    first, second = Host(2, 64, 4).whole_rows(draw(4, 128, seed=1), absent=1)
    assert first[:, 64:].isnan().all() and not first[:, :64].isnan().any()
    assert not second[:, :64].isnan().any()


def test_what_does_not_fit_is_refused():
    exchange = Host(2, 64, 4).made[0]
    for x, reason in ((torch.zeros(5, 64), "5 rows"), (torch.zeros(4, 64).half(), "float16")):
        with pytest.raises(ValueError, match=reason):
            exchange.whole_rows(x)
    with pytest.raises(ValueError, match="take fewer rows"):
        peer_rows.run_take_rows(
            torch.zeros(9, 64), torch.zeros(5, 128), exchange._peers, Buffers(0, 2048)
        )
