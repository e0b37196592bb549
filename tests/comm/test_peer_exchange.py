"""What of the exchange over peer memory needs no GPU: places, owners, refusals."""

import pytest
import torch

from tests.lib.thread_world import run_threads
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.comm.exchange.open import open_exchange
from tpdet.comm.exchange.slot_layout import PIECE_ROWS, SLOT_BYTES, SlotLayout
from tpdet.comm.world.world import SoloWorld
from tpdet.errors import UsageError
from tpdet.kernels import order

pytest.importorskip("triton")

from tpdet.kernels.cuda.exchange.arguments import everyone_owns


def test_parts_of_the_shared_memory_do_not_overlap():
    for ranks, slots, rows, hidden in ((2, 4, 8192, 8192), (4, 1, 300, 4096), (8, 1, 1, 256)):
        layout = SlotLayout(ranks, slots, rows, hidden, torch.bfloat16)
        starts = layout.one_shot_start, layout.roots_start, layout.y_start, layout.flag_start
        sizes = (
            2 * ranks * slots * layout.one_shot_rows * hidden * 4,
            2 * ranks * slots * layout.share_rows * hidden * 4,
            2 * layout.piece_rows * hidden * 2,
        )
        ends = [start + size for start, size in zip(starts, sizes, strict=False)]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=True))
        assert all(start % 16 == 0 for start in starts) and layout.bytes > starts[-1]
        assert sizes[1] <= SLOT_BYTES
        assert layout.share_rows * ranks >= layout.piece_rows


def test_pieces_cover_a_step_and_none_is_over_the_room():
    layout = SlotLayout(4, 1, 16384, 4096, torch.bfloat16, piece_rows=PIECE_ROWS)
    for rows in (0, 1, 8191, 8192, 8193, 16384):
        pieces = layout.pieces(rows)
        assert [row for piece in pieces for row in piece] == list(range(rows))
        assert all(0 < len(piece) <= layout.piece_rows for piece in pieces)


def test_a_two_shot_gives_every_rank_a_row():
    for ranks in (2, 3, 4, 8):
        for rows in range(1, 100):
            share = -(-rows // ranks)
            owned = [len(range(rows)[r * share : (r + 1) * share]) for r in range(ranks)]
            assert sum(owned) == rows and everyone_owns(rows, ranks) == (min(owned) > 0)
            # Rows that the two-shot cannot take have room in the one-shot.
            layout = SlotLayout(ranks, 1, 100, 4096, torch.bfloat16, one_shot_rows=0)
            assert everyone_owns(rows, ranks) or rows <= layout.one_shot_rows


def test_auto_takes_what_the_device_has_and_peer_is_never_replaced():
    plan = order.fold_plan("pairs", 8, 2)

    def check(world):
        cpu = torch.device("cpu")
        for transport in ("auto", "gather"):
            made = open_exchange(transport, plan, world, 64, 256, torch.float32, cpu)
            assert isinstance(made, GatherExchange) and made.carrier.memory is None
            made.carrier.report()
            made.carrier.check()
            assert made.carrier.all_gather(torch.tensor([world.rank])).tolist() == [[0], [1]]
        with pytest.raises(UsageError, match="use --transport gather"):
            open_exchange("peer", plan, world, 64, 256, torch.float32, cpu)

    run_threads(2, check)
    alone = order.fold_plan("pairs", 8, 1)
    made = open_exchange("peer", alone, SoloWorld(), 64, 256, torch.float32, torch.device("cpu"))
    assert isinstance(made, GatherExchange)
