"""The kernels that gather columns in Triton's interpreter; tensors stand for the peers' memory.

The ranks take turns, phase by phase.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.kernels.peer_host import EPS, FakeMemory, draw, only
from tpdet.comm.exchange.peer_columns import PeerColumns
from tpdet.kernels.cuda.exchange import columns as peer_columns
from tpdet.kernels.cuda.exchange.arguments import Buffers
from tpdet.kernels.cuda.pointwise import finish
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import whole_sum


class Host:
    """Ranks that take turns, each with an exchange of its own as the engine makes it."""

    def __init__(self, ranks, widest, hidden, dtype, rows=64, piece_rows=64):
        self.ranks, self.hidden, self.dtype = ranks, hidden, dtype
        self.made = [
            PeerColumns(FakeMemory(rank, ranks), rows, (widest, hidden), dtype, piece_rows)
            for rank in range(ranks)
        ]
        addresses = torch.tensor([each._buffers.own.data_ptr() for each in self.made])
        for each in self.made:
            assert each._buffers.own.data_ptr() % 16 == 0
            each._buffers.addresses.copy_(addresses)
            each._peers = replace(each._peers, live=False)

    def run(self, call, absent=None):
        """call(exchange, rank) of every rank, phase by phase; rank `absent` pushes nothing."""
        found, calls = [], []
        for rank, exchange in enumerate(self.made):
            with _recorded_calls() as recorded:
                found.append(call(exchange, rank))
            calls.append(recorded)
        for piece in zip(*calls, strict=True):
            for phase in ("push", "take"):
                for rank, (run, arguments) in enumerate(piece):
                    if phase == "take" or rank != absent:
                        run(*arguments, phases=only(phase))
        return found

    def gather(self, whole, absent=None):
        return self.run(lambda exchange, r: exchange.gather_columns(self.part(whole, r)), absent)

    def norm(self, whole, residual, weight, kind="rms"):
        return self.run(
            lambda exchange, r: exchange.gather_and_norm(
                self.part(whole, r), Finish(residual, Norm(weight, EPS, kind, self.dtype))
            )
        )

    def part(self, whole, rank):
        """A rank's columns, with rows that lie apart."""
        return whole.chunk(self.ranks, dim=1)[rank]

    def armed(self):
        return all((each._buffers.own == -1).all() for each in self.made)


@contextmanager
def _recorded_calls():
    """What an exchange would run, for every piece, instead of running it."""
    names = ("run_gather_columns", "run_gather_and_norm")
    runs = {name: getattr(peer_columns, name) for name in names}
    calls = []
    for name, run in runs.items():
        setattr(peer_columns, name, lambda *arguments, run=run: calls.append((run, arguments)))
    try:
        yield calls
    finally:
        for name, run in runs.items():
            setattr(peer_columns, name, run)


def test_columns_stand_side_by_side_on_every_rank():
    """Rows of any number and width follow each other through both buffers, and piece by piece."""
    for ranks, dtype in ((2, torch.float32), (4, torch.float16), (8, torch.float16)):
        host = Host(ranks, 48 * ranks, 32, dtype, piece_rows=5)
        for turn, (rows, width) in enumerate(((1, 48), (5, 32), (12, 48), (3, 2))):
            whole = draw(rows, width * ranks, seed=turn, kind="heavy").to(dtype)
            for gathered in host.gather(whole):
                assert_same_bits(gathered, whole, f"{rows} rows of {width}, {ranks} ranks")
            assert host.armed(), "words were left behind"


def test_the_norm_has_the_bits_of_the_whole_rows():
    for ranks, dtype, hidden, factor in (
        (2, torch.float16, 96, torch.float16),
        (2, torch.bfloat16, 96, torch.float32),
        (4, torch.float32, 64, torch.float32),
    ):
        host = Host(ranks, hidden, hidden, dtype, piece_rows=4)
        for turn, rows in enumerate((1, 4, 7)):
            whole = draw(rows, hidden, seed=turn, kind=("heavy", "tiny", "cancelling")[turn])
            whole, residual = whole.to(dtype), draw(rows, hidden, seed=turn + 9)
            weight = draw(hidden, seed=5).to(factor)
            by = Finish(residual, Norm(weight, EPS, rows=dtype))
            h, y = finish.fold_and_norm(whole_sum(whole), by)
            assert_same_bits(h, whole.float() + residual, "h is fp32, one addition")
            assert y.dtype == dtype and not same_bits(h, h.half().float())
            for mine, normed in host.norm(whole, residual, weight):
                assert_same_bits(mine, h, f"h of {rows} rows")
                assert_same_bits(normed, y, f"y of {rows} rows")
            assert host.armed()


def test_a_layer_norm_has_the_bits_of_the_whole_rows():
    host = Host(2, 96, 96, torch.float16)
    whole, residual, weight = draw(3, 96).half(), draw(3, 96, seed=1), draw(2, 96, seed=2).half()
    layer = Norm(weight, EPS, "layer")
    h, y = finish.fold_and_norm(whole_sum(whole), Finish(residual, layer))
    for mine, normed in host.norm(whole, residual, weight, "layer"):
        assert_same_bits(mine, h)
        assert_same_bits(normed, y)


def test_both_kinds_may_alternate():
    host = Host(2, 64, 32, torch.float16)
    for turn, normed in enumerate((False, True, True, False, False, True)):
        whole = draw(3, 32 if normed else 64, seed=turn).half()
        if normed:
            residual = draw(3, 32, seed=turn + 9)
            found = [h for h, _ in host.norm(whole, residual, residual[0].half())]
            whole = whole.float() + residual
        else:
            found = host.gather(whole)
        for each in found:
            assert_same_bits(each, whole, f"turn {turn}")
    assert all(each._peers.counter.tolist() == [6, 0] for each in host.made)


def test_words_like_those_that_have_not_come_stay_nan():
    host = Host(2, 64, 32, torch.float16)
    whole = draw(4, 64, seed=1).half()
    whole.view(torch.int16)[1, 6:8] = -1
    whole.view(torch.int16)[2, 40] = -1
    for found in host.gather(whole):
        assert torch.equal(found.isnan(), whole.isnan())
        assert_same_bits(found[[0, 3]], whole[[0, 3]])
    stream = draw(4, 32, seed=2).half()
    stream.view(torch.int16)[1, 20] = -1
    first, second = host.norm(stream, stream.nan_to_num().float(), stream[0])
    assert first[0][1, 20].isnan() and not first[0][[0, 2, 3]].isnan().any()
    assert first[1][1].isnan().all()  # a norm of a row that holds NaN
    assert_same_bits(first[0], second[0])
    assert host.armed()


def test_what_has_not_come_is_seen():
    """Negative control: a kernel that looks once finds no columns of a rank that pushed none."""
    host = Host(2, 64, 32, torch.float16)
    whole = draw(2, 64, seed=1).half()
    first, second = host.gather(whole, absent=1)
    assert first[:, 32:].isnan().all() and same_bits(first[:, :32].clone(), whole[:, :32].clone())
    assert not second[:, :32].isnan().any()


def test_what_does_not_fit_is_refused():
    host = Host(2, 64, 32, torch.float16, piece_rows=4)
    x, whole = torch.zeros(9, 32).half(), torch.zeros(9, 64).half()
    for arguments, reason in (
        ((x, whole, host.made[0]._peers, Buffers(0, 1024)), "take fewer rows"),
        ((x[:, :31], whole, host.made[0]._peers, Buffers(0, 4096)), "multiples of 4 bytes"),
    ):
        with pytest.raises(ValueError, match=reason):
            peer_columns.run_gather_columns(*arguments)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        host.made[0].gather_columns(x.float())
