"""Rows behind unverified drafts in a packed step: moved by the kernel as by the host."""

import numpy as np
import pytest
import torch

from tpdet.control.plan import PlanRows, Row, settle_rows
from tpdet.kernels.cpu.pointwise import drafts as on_cpu
from tpdet.kernels.cuda.pointwise import drafts as on_gpu
from tpdet.runner.graphs.draft_moves import move_numbers
from tpdet.runner.graphs.packed_step import BatchShape, StepShape, StepSpans, pack_step

WIDTH, SCRATCH = 4, 40
SHAPE = StepShape((BatchShape(128, 16, 0, 64, WIDTH, 16),))


def rows_behind(draw, sampled):
    """Rows of some sequences; the step before sampled at drafts that are right up to anywhere."""
    rows, first = [], 0
    for number in range(int(draw.integers(1, 13))):
        unverified = int(draw.choice([0, 0, 1, 3, 15]))
        count = int(draw.choice([1, 2, 5]))
        start = int(draw.choice([3, 240, 250, 255, 256, 511]))
        before, ids, expected = unverified + 1, tuple(range(70, 70 + count)), ()
        if unverified or draw.integers(2):
            ids = (-1 - first, *ids[1:])
        if unverified:
            drafts = sampled[first : first + unverified].copy()
            if (wrong := int(draw.integers(unverified + 1))) < unverified:
                drafts[wrong] += 1
                drafts[wrong + 2 :] += 1
            expected = tuple(int(id_) for id_ in drafts) + tuple(range(500, 500 + count))
        pages = tuple(int(page) for page in draw.permutation(SCRATCH)[:3])
        states = -1, 0
        rows.append(
            Row(
                number,
                0,
                7,
                start,
                ids,
                pages,
                (1, 1, 1),
                count,
                count,
                *states,
                unverified,
                expected,
            )
        )
        first += before
    return PlanRows.of(rows)


def packed(rows):
    buffer = torch.full((SHAPE.words,), 77, dtype=torch.int32)
    pack_step(rows, SHAPE, StepSpans.of(rows, WIDTH, SCRATCH).within(SHAPE), buffer, SCRATCH)
    return buffer


def moved(rows, sampled, kernel):
    buffer, moved = packed(rows), torch.full((int(rows.count.sum()),), 99)
    ids, (parts,) = SHAPE.views(buffer, torch.int64)
    of = parts.positions, parts.slots, parts.spans, parts.tables
    numbers = torch.from_numpy(move_numbers(rows))
    kernel.follow_drafts(ids, *of, numbers, torch.from_numpy(sampled), moved)
    return ids, parts, moved


@pytest.mark.parametrize("seed", range(12))
def test_a_kernel_moves_rows_as_the_host_does(seed):
    draw = np.random.default_rng(seed)
    sampled = draw.integers(1000, 2000, 256)
    rows = rows_behind(draw, sampled)
    assert seed == 0 or rows.expected or not rows.unverified.any()
    settled, moves = settle_rows(rows, sampled)
    expected_ids, (expected,) = SHAPE.views(packed(settled), torch.int64)
    known = expected_ids >= 0
    for kernel in (on_cpu, on_gpu):
        ids, parts, by = moved(rows, sampled, kernel)
        assert torch.equal(ids[known], expected_ids[known])
        assert by.tolist() == np.repeat(moves, rows.count).tolist()
        for name in ("positions", "slots", "tables", "spans"):
            assert torch.equal(getattr(parts, name), getattr(expected, name)), name
        listed = {tuple(split) for split in parts.splits.tolist()}
        assert listed >= {tuple(split) for split in expected.splits.tolist()}


def test_rows_move_by_any_number_of_right_drafts():
    counts = set()
    for seed in range(12):
        draw = np.random.default_rng(seed)
        sampled = draw.integers(1000, 2000, 256)
        counts |= set(settle_rows(rows_behind(draw, sampled), sampled)[1].tolist())
    assert {0, 1, 2, 3} <= counts and max(counts) > 9
