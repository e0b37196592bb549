"""The exchange kernels in Triton's interpreter: ordinary tensors stand for the peers' memory.

The ranks take turns, phase by phase, so nothing has to wait; a kernel looks once for what must
have come.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.kernels.owned_rows import owned_rows
from tests.lib.kernels.peer_host import EPS, FakeMemory, Host, draw, inputs, only
from tests.lib.some_slow import some_slow
from tpdet.comm.exchange import peer_carrier
from tpdet.comm.exchange.peer import PeerExchange
from tpdet.comm.exchange.peer_carrier import PeerCarrier
from tpdet.kernels import order
from tpdet.kernels.cuda.exchange import gather as peer_gather
from tpdet.kernels.cuda.exchange import one_shot as peer_fold
from tpdet.kernels.cuda.exchange import spread as peer_spread
from tpdet.kernels.cuda.exchange import two_shot as peer_two_shot
from tpdet.kernels.cuda.exchange.gather import embed_from_peers, run_gather
from tpdet.kernels.cuda.exchange.one_shot import run_one_shot
from tpdet.kernels.cuda.exchange.spread import run_two_shot_spread
from tpdet.kernels.cuda.exchange.two_shot import run_two_shot
from tpdet.kernels.inputs.norm import Finish, Norm

in_every_order = pytest.mark.parametrize("name", order.FOLD_ORDERS)
in_every_order_and_size = pytest.mark.parametrize(
    ("name", "ranks"),
    some_slow(
        [("sequential", 2), ("pairs", 2), ("tree", 4)],
        [(name, ranks) for name in order.FOLD_ORDERS for ranks in (2, 4)],
    ),
)


def check(host, rows, seed, two_shot, kind="normal", folded=False):
    leaves, residual, weight = inputs(host, rows, seed, kind)
    h, y = host.expected(leaves, residual, weight)
    share = -(-rows // host.ranks)
    found = (
        host.direct(leaves, residual, weight, folded)
        if two_shot == "direct"
        else host.exchange(leaves, residual, weight, two_shot, folded)
    )
    for rank, (mine, normed) in enumerate(found):
        owned = slice(rank * share, (rank + 1) * share) if two_shot else slice(None)
        what = f"{rows} rows, rank {rank} of {host.ranks}, {kind}"
        assert_same_bits(mine[owned], h[owned], f"h, {what}")
        assert_same_bits(normed, y, f"y, {what}")
    assert host.armed(), f"{rows} rows left words behind"


@pytest.mark.parametrize(
    ("name", "ranks"),
    some_slow(
        [("sequential", 4), ("pairs", 8), ("tree", 2)],
        [(name, ranks) for name in order.FOLD_ORDERS for ranks in (2, 4, 8)],
    ),
)
def test_one_shot_has_the_bits_of_the_whole_fold(name, ranks):
    """Exchanges of other sizes follow each other through both buffers."""
    dtype = {2: torch.float32, 4: torch.bfloat16, 8: torch.float16}[ranks]
    host = Host(name, ranks, 48, dtype)
    for turn, rows in enumerate((1, 5, 4)):
        kind = ("tiny", "heavy", "cancelling")[turn]
        check(host, rows, turn, False, kind, folded=turn % 2 == 1)


@in_every_order_and_size
def test_two_shot_has_the_bits_of_the_whole_fold(name, ranks):
    dtype = torch.float16 if ranks == 2 else torch.float32
    host = Host(name, ranks, 64, dtype, programs=2, tile=ranks // 2)
    for turn, rows in enumerate((13, 8)):
        check(host, rows, turn, True, ("heavy", "cancelling")[turn], turn == 1)


@in_every_order
def test_empty_leaves_are_in_no_sum_and_leave_the_slots_in_order(name):
    """A product without some leaves between two that have all: fewer roots, the same slots."""
    host = Host(name, 2, 32, torch.float16)
    for turn, (empty, kind) in enumerate(
        (
            *(((), False), ((0, 2, 4, 6), False), ((), False), ((1, 5, 6, 7), True)),
            *(((), True), ((0, 2, 4, 6), "spread"), ((), "direct"), ((0, 3, 4), "direct")),
        )
    ):
        host.fold(name, empty)
        check(host, 5, turn, kind, "cancelling")


def test_rows_may_be_taken_together():
    """Tiles that the last program, the last owner or both cannot fill."""
    for ranks, rows, tile in ((2, 21, 4), (4, 21, 2)):
        host = Host("pairs", ranks, 32, torch.float16, programs=2, tile=tile)
        for turn, kind in enumerate((True, "direct", True)):
            check(host, rows - turn, turn, kind)


@in_every_order_and_size
def test_a_program_may_have_a_row(name, ranks):
    host = Host(name, ranks, 64, torch.float16 if ranks == 2 else torch.float32)
    for turn, (rows, kind) in enumerate(((7, "heavy"), (4, "tiny"), (4, "cancelling"))):
        check(host, rows, turn, "spread", kind, turn == 1)
        check(host, rows + 3 + turn % 2, turn, True, kind)


@in_every_order_and_size
def test_finished_rows_land_where_they_are_read(name, ranks):
    host = Host(name, ranks, 64, torch.bfloat16 if ranks == 2 else torch.float32)
    for turn, rows in enumerate((7, 4, 13)):
        check(host, rows, turn, "direct", ("heavy", "cancelling", "tiny")[turn], turn == 1)
    check(host, 7, 6, "spread")
    check(host, 8, 5, True)  # the other kind shares root slots and counter
    for rank in range(ranks):
        raised = host.flags(rank)[[r for r in range(ranks) if r != rank]]
        assert (raised[:, 0] == 3).all() and (raised[:, 3:] == 0).all(), raised
    check(host, 7, 7, "direct")  # numbered on the device, among all two-shots
    assert host.flags(0)[1, 0] == 6 and host.peers[1][0].counter.tolist() == [6, 0]


def test_one_exchange_leaves_the_last_ones_rows():
    """Two y take turns: those of exchange d are still there after d + 1, and gone after d + 2."""
    host = Host("pairs", 2, 32, torch.float16)
    given = [inputs(host, 8, seed) for seed in range(3)]
    first = host.direct(*given[0])
    kept = first[0][1].clone()
    host.direct(*given[1])
    assert same_bits(first[0][1], kept)
    host.direct(*given[2])
    assert not same_bits(first[0][1], kept)


@pytest.mark.parametrize("ranks", some_slow([2], [2, 4]))
def test_a_step_may_begin_with_either_y(ranks):
    """A replayed graph always begins with the y it was captured with, whatever ran before."""
    host = Host("pairs", ranks, 32, torch.float16)
    for turn, begins in enumerate((0, 0, 1, 1, 0, 1)):  # steps of one exchange and of two
        for half in range(1 + turn % 2):
            host.epoch = begins + half
            check(host, 7 + turn + turn // 2, 2 * turn + half, "direct")


def test_both_kinds_may_alternate():
    host = Host("pairs", 4, 32, torch.float16)
    for turn, two_shot in enumerate((False, True, True, False, False, True)):
        check(host, 7 if two_shot else 3, turn, two_shot)


def test_exchanges_are_numbered():
    host = Host("pairs", 2, 32, torch.float16)
    for turn in range(3):
        check(host, 5, turn, False)
    for peers in host.peers[0]:
        assert peers.counter.tolist() == [3, 0], peers.counter


def test_rounding_is_not_shared_by_another_order():
    """Negative control: these data tell the orders apart."""
    leaves, residual, weight = inputs(Host("pairs", 2, 64, torch.float32), 4, 0, "heavy")
    found = [
        Host(name, 2, 64, torch.float32).exchange(leaves, residual, weight, False)[0][0]
        for name in ("sequential", "pairs")
    ]
    assert not same_bits(*found)


def test_the_stream_is_not_rounded():
    """Negative control: h has bits that the model's dtype has not, by every kind of exchange."""
    for two_shot in (False, True, "spread", "direct"):
        host = Host("tree", 2, 32, torch.bfloat16)
        given = inputs(host, 4, 3)
        found = host.direct(*given) if two_shot == "direct" else host.exchange(*given, two_shot)
        h, y = found[0]
        assert (h.dtype, y.dtype) == (torch.float32, torch.bfloat16)
        assert not same_bits(h[0], h[0].bfloat16().float()), two_shot


def test_a_factor_in_fp32_is_not_rounded_to_its_rows():
    host = Host("tree", 2, 32, torch.bfloat16)
    host.wide = True
    check(host, 5, 0, "direct")
    leaves, residual, weight = inputs(host, 5, 0)
    wide, narrow = (host.expected(leaves, residual, w)[1] for w in (weight, weight.bfloat16()))
    assert wide.dtype == narrow.dtype == torch.bfloat16
    assert not same_bits(wide, narrow)  # negative control: the rounded factor shows


def test_layer_norms_have_the_bits_of_whole_rows_too():
    """Their factors and biases in fp32, so that every kernel rounds to the dtype of its rows."""
    for turn, two_shot in enumerate((False, True, "spread", "direct")):
        host = Host("tree", 2, 48, torch.float16)
        host.kind, host.wide = "layer", turn > 0
        check(host, 4, turn, two_shot, "heavy")


def test_norms_behind_blocks_have_the_bits_of_whole_rows_too():
    """With a norm that follows, and without one: then y is the stream, rounded."""
    for turn, two_shot in enumerate((False, True, "spread", "direct")):
        for normed in (True, False):
            host = Host("pairs", 2, 48, torch.bfloat16)
            host.behind, host.normed, host.kind = True, normed, ("rms", "layer")[turn % 2]
            check(host, 4, turn, two_shot, "heavy")


def test_a_stream_or_a_norm_of_another_dtype_is_refused():
    plan = order.fold_plan("pairs", 8, 2)
    made = PeerExchange(plan, FakeMemory(0, 2), 40, 32, torch.bfloat16, 4, piece_rows=11)
    sums = Host("pairs", 2, 32, torch.bfloat16).sums(draw(8, 3, 32), 0, False)
    weight = draw(32, seed=1)
    for residual, norm in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)):
        with pytest.raises(ValueError, match=f"{residual} normed to {norm}"):
            given = Finish(draw(3, 32).to(residual), Norm(weight.to(norm), EPS))
            made.fold_and_norm(sums, given)


def test_data_may_hold_every_bit_pattern():
    """A NaN with all bits set is not taken for a word that has not come."""
    for two_shot in (False, True):
        host = Host("tree", 2, 32, torch.float16)
        leaves, residual, weight = inputs(host, 4, 3)
        leaves.view(torch.int32)[:, 1, 5] = -1
        leaves[2, 2, 7] = float("inf")
        whole = host.expected(leaves, residual, weight)[1]
        for _, y in host.exchange(leaves, residual, weight, two_shot, folded=True):
            assert torch.equal(y.isnan(), whole.isnan())
            assert_same_bits(y[[0, 3]], whole[[0, 3]])
        assert host.armed()


def test_what_has_not_come_is_seen():
    for two_shot in (False, True):
        host = Host("pairs", 2, 32, torch.float16)
        leaves, residual, weight = inputs(host, 4, 3)
        found = host.exchange(leaves, residual, weight, two_shot, absent=1)
        assert found[0][1][0].isnan().all()
        assert bool(found[1][1][3].isnan().any()) is False


def test_an_exchange_cuts_a_step_into_pieces():
    """Steps over the room go piece by piece, small ones at once; the host's side as it is."""
    ranks, hidden, dtype = 2, 32, torch.float16
    host = Host("sequential", ranks, hidden, dtype)
    made = [
        PeerExchange(host.plan, FakeMemory(rank, ranks), 40, hidden, dtype, 4, piece_rows=11)
        for rank in range(ranks)
    ]
    addresses = torch.tensor([exchange._shared.own.data_ptr() for exchange in made])
    for exchange in made:
        exchange._shared.addresses.copy_(addresses)
        for name in ("_one", "_two"):
            setattr(exchange, name, replace(getattr(exchange, name), live=False))
    for rows in (3, 4, 11, 12, 40):
        leaves, residual, weight = inputs(host, rows, rows)
        h, y = host.expected(leaves, residual, weight)
        found, calls = [], []
        for rank, exchange in enumerate(made):
            sums = host.sums(leaves, rank, False)
            with _recorded_calls() as recorded:
                found.append(exchange.fold_and_norm(sums, Finish(residual, Norm(weight, EPS))))
            calls.append(recorded)
        for piece in zip(*calls, strict=True):
            for phase in ("push", "fold", "take"):
                for run, arguments in piece:
                    if phase != "take" or run in (run_two_shot, run_two_shot_spread):
                        run(*arguments, phases=only(phase))
        for rank, (exchange, (mine, normed)) in enumerate(zip(made, found, strict=True)):
            for owned in owned_rows(exchange, rows, rank, len(made)):
                part = slice(owned.start, owned.stop)
                assert_same_bits(mine[part], h[part], f"h of {rows} rows")
            assert_same_bits(normed, y, f"y of {rows} rows")
            assert (exchange._shared.own[: exchange.layout.flag_start // 4] == -1).all()
            exchange.carrier.report()
            exchange.carrier.check()


@contextmanager
def _recorded_calls():
    """What an exchange would run, for every piece, instead of running it."""
    runs = {
        "run_one_shot": (peer_fold, run_one_shot),
        "run_two_shot": (peer_two_shot, run_two_shot),
        "run_two_shot_spread": (peer_spread, run_two_shot_spread),
    }
    calls = []
    for name, (module, run) in runs.items():
        setattr(module, name, lambda *arguments, run=run: calls.append((run, arguments)))
    try:
        yield calls
    finally:
        for name, (module, run) in runs.items():
            setattr(module, name, run)


def test_gathers_words_of_any_bits(monkeypatch):
    """Through the carrier of every rank, in both buffers; more words than one kernel takes too."""
    monkeypatch.setattr(peer_carrier, "GATHER_WORDS", 2048)
    made = [PeerCarrier(FakeMemory(rank, 4)) for rank in range(4)]
    addresses = torch.tensor([carrier._slots.own.data_ptr() for carrier in made])
    for carrier in made:
        carrier._gather = replace(carrier._gather, table=addresses, live=False)
    for turn, words in enumerate((1, 3000, 7, 2048)):
        generators = [torch.Generator().manual_seed(turn * 8 + r) for r in range(4)]
        sent = [
            torch.randint(-(2**31), 2**31, (words,), generator=generator).int()
            for generator in generators
        ]
        for x in sent:
            x[0] = -1
        for gathered in _gathered(made, sent):
            assert_same_bits(gathered, torch.stack(sent))


def _gathered(made, sent):
    """What each rank gathers: all ranks push a piece, then all take it."""
    found, calls = [], []
    for carrier, x in zip(made, sent, strict=True):
        with mock.patch.object(peer_gather, "run_gather") as run:
            carrier.all_gather(x)
        calls.append([call.args for call in run.call_args_list])
        found.append([into for _, into, *_ in calls[-1]])
    for piece in zip(*calls, strict=True):
        for phase in ("push", "take"):
            for arguments in piece:
                run_gather(*arguments, phases=only(phase))
    return [torch.cat(parts, dim=1) for parts in found]


def test_embeds_rows_of_all_parts():
    whole = draw(4 * 10, 96).half()
    parts = [whole[r * 10 : (r + 1) * 10].clone() for r in range(4)]
    table = torch.tensor([part.data_ptr() for part in parts])
    ids = torch.tensor([0, 39, 10, 9, 31, 31])
    for part in parts:
        assert_same_bits(embed_from_peers(ids, part, table), whole[ids].float())
