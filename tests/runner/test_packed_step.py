"""A step packed for a graph: the numbers that `make_batch` gives, and pads that touch nothing."""

import random
import time
from dataclasses import replace

import pytest
import torch

from tpdet.control.plan import NO_ROWS, PlanRows, Row
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS
from tpdet.models.micro_batches import MICRO_BATCH_ROWS, first_micro_batch
from tpdet.runner.graphs.packed_step import (
    BatchShape,
    StepShape,
    StepSpans,
    pack_step,
    packed_batches,
)
from tpdet.runner.graphs.step_graphs import LEAST_ROWS, step_rows, step_shapes

WIDTH, SCRATCH = 12, 500
ALL_PAGES = tuple(range(WIDTH))


def random_rows(draw, sequences, most, singles):
    """Rows of a plan: `singles` of one token, then chunks."""
    rows = []
    for index in range(sequences):
        count = 1 if index < singles else draw.randrange(1, most)
        start = draw.choice((0, draw.randrange(WIDTH * PAGE_TOKENS - count)))
        held = -(-(start + count) // PAGE_TOKENS)
        pages = tuple(draw.sample(range(SCRATCH), held + (held < WIDTH and draw.randrange(2))))
        ids = tuple(draw.randrange(-9, 1000) for _ in range(count))
        state = index, max(0, start // CHUNK_TOKENS - draw.randrange(2))
        logits = draw.randrange(count + 1)
        chunks = range(start // CHUNK_TOKENS + 1, (start + count - 1) // CHUNK_TOKENS)
        kept = tuple((chunk, 100 + chunk) for chunk in chunks if draw.randrange(2))
        row = Row(index, 0, 0, start, ids, pages, pages, logits, 0, *state, snapshots=kept)
        rows.append(row)
    return PlanRows.of(rows)


def halves_of(rows, middle):
    """The sequences before and after a row, as batches of their own, one row after another."""
    halves, place = [[], []], 0
    for row in rows:
        for token in range(len(row.token_ids)):
            half, first = halves[place >= middle], place - middle * (place >= middle)
            start = row.start + token
            if half and token and half[-1].start + half[-1].count == start:
                half[-1] = replace(half[-1], count=half[-1].count + 1)
            else:
                standing = (start - 1) // CHUNK_TOKENS if token else row.standing
                kept = tuple((chunk, slot + 1) for chunk, slot in row.snapshots)
                state = row.slot, standing, False, kept
                half.append(PagedSequence(first, 1, start, row.pages, *state))
            place += 1
    return halves


def packed(rows, shape):
    """Ids and batches of a buffer that held anything before."""
    generator = torch.Generator().manual_seed(1)
    buffer = torch.randint(-(2**31), 2**31, (shape.words,), generator=generator).int()
    parts = StepSpans.of(rows, WIDTH, SCRATCH).within(shape)
    assert parts is not None, "the step does not fit"
    pack_step(rows, shape, parts, buffer, SCRATCH)
    return packed_batches(shape, buffer, SCRATCH)


def check_batch(batch, shape, sequences):
    """The real numbers are `make_batch`'s; what follows them is inert."""
    wanted = make_batch(tuple(sequences), short_tokens=int(shape.splits > 0))
    total, count = wanted.row_count, len(sequences)
    for name in ("positions", "slots", "blocks", "splits", "short", "states", "pieces", "runs"):
        real = getattr(wanted, name)
        assert torch.equal(getattr(batch, name)[: len(real)], real), name
    widest = wanted.tables.shape[1]
    table = torch.where(wanted.tables < 0, SCRATCH, wanted.tables)
    assert torch.equal(batch.tables[:count, :widest], table)
    assert (batch.tables[:count, widest:] == SCRATCH).all() and (
        batch.tables[count:] == SCRATCH
    ).all()
    assert torch.equal(batch.rows[:count], wanted.rows) and (batch.rows[count:] == 0).all()
    assert (batch.positions[total:] == 0).all()
    assert (batch.slots[total:] // PAGE_TOKENS == SCRATCH).all()
    for name in ("blocks", "splits", "short"):
        pads = getattr(batch, name)[len(getattr(wanted, name)) :]
        assert (batch.rows[pads[:, 0].long(), 1] == 0).all(), f"{name}: a pad has rows"
        assert (pads[:, 1] == 0).all()
    assert (batch.rows[batch.runs[len(wanted.runs) :].long(), 1] == 0).all(), "runs: a pad has rows"
    assert batch.row_count == shape.rows == sum(s.count for s in batch.sequences)
    assert batch.short_rows == wanted.short_rows or not len(wanted.short)
    for part in (batch.positions, batch.slots, batch.tables, batch.rows, batch.blocks):
        assert part.data_ptr() % 16 == batch.positions.data_ptr() % 16


def test_random_steps_are_packed_as_batches_are_made():
    draw, cuts, kept = random.Random(3), 0, 0
    for turn in range(60):
        sequences = draw.randrange(1, 24)
        rows = random_rows(
            draw, sequences, draw.choice((3, 40, 300)), draw.randrange(sequences + 1)
        )
        total = sum(len(row.token_ids) for row in rows)
        height = max(total + draw.choice((0, 1, 130)), 2)
        middle = draw.randrange(1, height) if turn % 2 else height
        early = StepSpans.of(rows, WIDTH, SCRATCH).cut(middle)[0]
        splits = draw.choice((0, sequences * WIDTH))
        splits = splits or int((early.count == 1).any()) * sequences * WIDTH
        room = draw.choice((sequences, 40))
        halves = [BatchShape(middle, room, height, splits, WIDTH, linear=True)]
        if middle < height:
            halves.append(BatchShape(height - middle, room, height, 0, WIDTH, linear=True))
        shape = StepShape(tuple(halves))
        ids, batches = packed(rows, shape)
        assert ids[:total].tolist() == [i for row in rows for i in row.token_ids]
        assert (ids[total:] == 0).all() and len(ids) == height
        for batch, part, mine in zip(batches, halves, halves_of(rows, middle), strict=False):
            check_batch(batch, part, mine)
        starts = {row.start for row in rows}
        cuts += any(row[2] not in starts for row in batches[-1].rows.tolist() if row[1])
        named = sum(int((batch.pieces[:, 2] >= 0).sum()) for batch in batches)
        assert named == sum(len(row.snapshots) for row in rows), "each snapshot in one half"
        kept += named
    assert cuts > 5  # sequences that stand in both halves
    assert kept > 20


def test_an_empty_step_touches_the_scratch_page_alone():
    shape = StepShape((BatchShape(256, 8, 10, 64, WIDTH), BatchShape(100, 8, 10, 0, WIDTH)))
    ids, batches = packed(NO_ROWS, shape)
    assert (ids == 0).all()
    for batch, part in zip(batches, shape.batches, strict=True):
        check_batch(batch, part, [])


def test_what_a_shape_has_no_room_for_does_not_fit():
    row = lambda count, start=0: Row(0, 0, 0, start, (5,) * count, ALL_PAGES, ALL_PAGES, 1)
    spans = lambda *rows: StepSpans.of(PlanRows.of(rows), WIDTH, SCRATCH)
    shape = BatchShape(300, 3, 4, 5, WIDTH)
    fits = spans(row(257), row(1, 1023), row(1, 0))
    assert fits.fits(shape)
    for more in (
        spans(row(301)),  # rows
        spans(row(2), row(2), row(2), row(2)),  # sequences
        spans(row(129), row(129), row(2)),  # blocks: 2 + 2 + 1
        spans(row(257), row(1, 1024), row(1, 0)),  # splits: 5 + 1
    ):
        assert not more.fits(shape)
    assert spans(row(257)).within(StepShape((shape,))) is not None
    assert spans(row(257), row(1)).within(StepShape((replace(shape, splits=0),))) is None
    # Short sequences of the second half are blocks there.
    late = BatchShape(300, 3, 1, 0, WIDTH)
    cut = StepShape((BatchShape(257, 3, 3, 9, WIDTH), late))
    assert spans(row(257), row(1, 9)).within(cut) is not None
    assert spans(row(257), row(1, 9), row(1, 3)).within(cut) is None


def test_of_linear_layers_drafts_are_not_cut_and_each_chunk_wants_room():
    def spans(count, start, *rows, samples=0):
        row = Row(0, 0, 0, start, (5,) * count, ALL_PAGES, ALL_PAGES, 1, samples, 3, start // 64)
        return StepSpans.of(PlanRows.of([row, *rows]), WIDTH, SCRATCH)

    half = BatchShape(257, 3, 3, 9, WIDTH, linear=True)
    cut, crossing = StepShape((half, half)), Row(1, 0, 0, 63, (5,) * 2, (2,), (2,), 1, 0, 4, 0)
    assert spans(9, 60, crossing).within(cut) is not None
    assert spans(9, 60, crossing, samples=9).within(cut) is None
    few = BatchShape(16, 4, 0, 9, WIDTH, 16, linear=True)
    assert few.runs == 4 and replace(half, short_rows=2).runs == 3 and half.runs == 3
    assert few.pieces == 8 and BatchShape(16, 16, 0, 9, WIDTH, linear=True).pieces == 16
    assert spans(9, 60, *[crossing] * 3).fits(few)
    narrow = replace(few, rows=3, sequences=2)
    assert narrow.pieces == 3 and not spans(1, 60, *[crossing] * 2).fits(replace(narrow, rows=9))


def test_rows_of_buckets():
    few, more, most = range(256, 2048, 128), range(2048, 4096, 256), range(4096, 8193, 512)
    assert step_rows(8192) == [64, 128, *few, *more, *most]
    assert step_rows(8448) == [*step_rows(8192), 8448]
    assert step_rows(2048) == [64, 128, *few, 2048]
    assert step_rows(1000) == [64, 128, 256, 384, 512, 640, 768, 896, 1000]
    assert step_rows(40) == [40] and step_rows(LEAST_ROWS) == [64, 128, LEAST_ROWS]


@pytest.mark.parametrize("overlapped", [False, True])
def test_shapes_ascend_and_take_whole_prompts_and_full_decode_batches(overlapped):
    shapes = step_shapes(8192, 256, WIDTH, overlapped)
    sizes = [(shape.rows, shape.batches[0].splits) for shape in shapes]
    assert sizes == sorted(set(sizes)) and len(sizes) == 31 + 11 + 6 + 1 + 2 + 3
    assert {(512, 256), (640, 256), (640, 1024), (8192, 0)} <= {*sizes}
    for shape in shapes:
        halves = [batch.rows for batch in shape.batches]
        cut = overlapped and shape.rows >= MICRO_BATCH_ROWS
        assert len(halves) == 1 + cut and (not cut or halves[0] == first_micro_batch(shape.rows))
    draw = random.Random(5)
    long = Row(0, 0, 0, 0, (7,) * 2800, ALL_PAGES, ALL_PAGES, 1)
    rows = PlanRows.of([*random_rows(draw, 254, 2, 254), long, long])
    spans = StepSpans.of(rows, WIDTH, SCRATCH)
    needed = sum(row.start // PAGE_TOKENS + 1 for row in list(rows)[:254])
    taken = next(shape for shape in shapes if spans.within(shape))
    assert taken.rows == 6144 and 1 <= taken.batches[0].splits / needed < 4


@pytest.mark.parametrize(
    ("prompts", "decoding", "shape"),
    [
        ((4096, 4096), 0, (8192, 0)),
        ((30,), 0, (64, 256)),
        ((30,), 60, (128, 256)),
        ((100,), 100, (256, 1024)),
        ((512,), 0, (512, 256)),
        ((512,), 15, (640, 256)),
        ((512,), 100, (640, 1024)),
        ((8000,), 100, (8192, 1024)),
    ],
)
def test_a_step_pads_few_splits(prompts, decoding, shape):
    """Decoding rows of 1,000 positions, four splits each, before prompts."""
    rows = [Row(0, 0, 0, 999, (7,), ALL_PAGES, ALL_PAGES, 1)] * decoding
    rows += [Row(0, 0, 0, 0, (7,) * count, ALL_PAGES, ALL_PAGES, 1) for count in prompts]
    spans = StepSpans.of(PlanRows.of(rows), WIDTH, SCRATCH)
    taken = next(s for s in step_shapes(8192, 256, 32, False) if spans.within(s))
    assert (taken.rows, taken.batches[0].splits) == shape


def test_a_full_step_is_packed_in_about_a_millisecond():
    draw = random.Random(5)
    prompts = [Row(0, 0, 0, 0, (7,) * 2600, ALL_PAGES, ALL_PAGES, 1) for _ in range(3)]
    rows = PlanRows.of([*random_rows(draw, 250, 2, 250), *prompts])
    shape = next(
        s
        for s in step_shapes(8192, 256, WIDTH, True)
        if StepSpans.of(rows, WIDTH, SCRATCH).within(s)
    )
    buffer, times = torch.zeros(shape.words, dtype=torch.int32), []
    for _ in range(7):
        began = time.perf_counter()
        parts = StepSpans.of(rows, WIDTH, SCRATCH).within(shape)
        pack_step(rows, shape, parts, buffer, SCRATCH)
        times.append(time.perf_counter() - began)
    print(f"{1e3 * min(times):.2f} ms")
    assert min(times) < 0.02  # a loop over the rows in Python takes longer on a busy host, too
