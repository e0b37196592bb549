"""Steps with drafts, replayed from graphs and sampled by all ranks: the bits of plain decoding."""

import random

import pytest
import torch

from tests.engine.test_drafts import REQUESTS, assert_same, with_drafts
from tests.lib.engine_harness import ask, run
from tests.lib.kernels.recorded_graphs import recorded_graphs
from tpdet.control.plan import ByColumns, ByShares, LikeliestByColumns, PlanRows, Row
from tpdet.kernels.cuda.attention.decode_launch import merge_chunk
from tpdet.kernels.cuda.attention.variants import decode_variant
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.runner import RowSharing
from tpdet.runner.graphs.draft_graphs import draft_shape, largest_shape, rehearsed_shapes
from tpdet.runner.graphs.packed_step import StepSpans

TINY = {"kv_heads": 2, "hidden": 64, "intermediate": 128, "layers": 1}
KINDS = "perfect", "half", "wrong", "random"
PROMPT = [(11 * i + i * i) % 1100 for i in range(250)]
SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
WAYS = {
    LikeliestByColumns: {"max_tokens": 12},
    ByColumns: {**SAMPLED, "min_p": 0.01, "logprobs": 2},
    ByShares: {**SAMPLED, "top_p": 0.9, "logprobs": 2},
}


@pytest.mark.parametrize(
    ("tp", "kind"), [(1, "half"), *(pytest.param(2, k, marks=pytest.mark.slow) for k in KINDS)]
)
def test_replayed_steps_with_drafts_change_no_bit(tiny_model, tp, kind):
    model, requests = tiny_model("qwen3", **TINY), [*REQUESTS[:3], REQUESTS[-1]]
    plain = run(model, requests, look=False)
    with recorded_graphs() as replays:
        found = with_drafts(plain, model, kind, requests=requests, tp=tp)
    assert_same(found, plain, requests)
    drafted = [shape.batches[0] for shape in replays if shape.batches[0].short_rows > 1]
    assert len(drafted) >= 5 * tp
    assert len({*drafted}) > 1 and max(batch.sequences for batch in drafted) > 1


@pytest.mark.parametrize(
    "how", [ByShares, *(pytest.param(how, marks=pytest.mark.slow) for how in list(WAYS)[:2])]
)
def test_ranks_sample_steps_with_drafts_together(tiny_model, monkeypatch, how):
    """Every position of every row with the noise of its place, on all ranks alike."""
    model, ways, follow = tiny_model("qwen3", **TINY), [], RowSharing.follow

    def noting(self, plan):
        if plan.rows.verifies:
            ways.append(type(plan.sampling))
        return follow(self, plan)

    monkeypatch.setattr(RowSharing, "follow", noting)
    requests = [ask(f"r{i}", PROMPT[i : 20 + 9 * i], **WAYS[how]) for i in range(3)]
    expected = run(model, requests, look=False)
    settings = {"tp": 2, "ahead": True, "share_draws": "on"}
    assert_same(
        with_drafts(expected, model, "half", requests=requests, **settings), expected, requests
    )
    assert len(ways) > 6 and {*ways} == {how}


def plan_of(counts, starts):
    """Rows with drafts, or of one token, after `starts` computed tokens."""
    pages = lambda end: tuple(range(-(-end // PAGE_TOKENS)))
    return PlanRows.of(
        [
            Row(i, 0, 0, start, (5,) * n, pages(start + n), (1,) * len(pages(start + n)), n, n)
            for i, (n, start) in enumerate(zip(counts, starts, strict=True))
        ]
    )


def kernel_of(shape):
    """What decides which kernels of attention a shape needs: the variant, its rows, the merge."""
    batch = shape.batches[0]
    rows, average = 4 * batch.short_rows, batch.splits // batch.sequences
    variant = decode_variant(torch.bfloat16, 128, rows, batch.splits, batch.sequences)
    return batch.short_rows, variant, None if variant.fused else merge_chunk(average, 128)


@pytest.mark.parametrize("most", [1, 5, 20, 256])
def test_every_step_with_drafts_has_a_shape_with_room_and_compiled_kernels(most):
    draw, width, shapes = random.Random(1), 36, set()
    compiled = {kernel_of(shape) for shape in rehearsed_shapes(most, width)}
    words = largest_shape(most, width).words
    for _ in range(400):
        sequences, longest = draw.choice((1, 1, 3, 16, 17, 40, 64, 120)), draw.choice((2, 5, 8, 16))
        counts = [draw.randint(1, longest) for _ in range(min(sequences, most))]
        held = draw.choice((1, 4, width)) * PAGE_TOKENS
        starts = [draw.randrange(held - 16) for _ in counts]
        rows, total = plan_of(counts, starts), sum(counts)
        if total > 256 or max(counts) == 1:
            continue
        shape = draft_shape(rows, total, width)
        assert StepSpans.of(rows, width, 99).within(shape) is not None
        assert shape.batches[0].short_rows < 4 * max(counts) and shape.words <= words
        assert kernel_of(shape) in compiled
        shapes.add(shape)
    assert 5 < len(shapes) < 200


def test_only_steps_whose_rows_have_drafts_or_one_token_verify():
    verifies = lambda counts: plan_of(counts, [3] * len(counts)).verifies
    assert verifies([3, 1]) and not verifies([1, 1]) and not PlanRows.of([]).verifies
    prompt = Row(0, 0, 0, 0, (5, 6), (1,), (1,), 1, 1)
    assert not PlanRows.of([prompt]).verifies
