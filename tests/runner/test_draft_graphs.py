"""Steps with drafts, replayed from graphs and sampled by all ranks: the bits of plain decoding."""

import random

import pytest
import torch

from tests.engine.test_draft_model import still
from tests.engine.test_drafts import REQUESTS, assert_same, with_drafts
from tests.engine.test_drafts_ahead import ALL
from tests.engine.test_drafts_ahead import with_drafts as drafts_ahead
from tests.lib.engine_harness import ask, run
from tests.lib.kernels.recorded_graphs import recorded_graphs
from tpdet.config import EngineConfig
from tpdet.control.plan import ByColumns, ByShares, LikeliestByColumns, PlanRows, Row
from tpdet.kernels.cuda.attention.decode_launch import merge_chunk, streamed_form
from tpdet.kernels.cuda.attention.variants import decode_variant
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.runner import RowSharing
from tpdet.runner.graphs import engine_graphs
from tpdet.runner.graphs.draft_graphs import (
    DraftGraphs,
    draft_shape,
    largest_shape,
    rehearsed_shapes,
    usual_shapes,
)
from tpdet.runner.graphs.draft_moves import DraftMoves
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
        found = with_drafts(plain, model, kind, requests=requests, tp=tp, max_num_seqs=2)
    assert_same(found, plain, requests)
    drafted = [shape.batches[0] for shape in replays if shape.batches[0].short_rows > 1]
    assert len(drafted) >= 5 * tp
    assert len({*drafted}) > 1 and max(batch.sequences for batch in drafted) > 1


def test_the_second_step_of_a_shape_is_captured(tiny_model, monkeypatch):
    """A shape that one step has costs no capture, which takes longer than that step."""
    model, requests = tiny_model("qwen3", **TINY), [*REQUESTS[:3], REQUESTS[-1]]
    plain, replayed, run_graph = run(model, requests, look=False), {}, DraftGraphs.run

    def noting(self, rows, moves=None):
        logits = run_graph(self, rows, moves)
        total = int(rows.count.sum())
        if rows.verifies and total <= 256 and rows.count.max() <= 16:
            steps = replayed.setdefault(draft_shape(rows, total, self._width), [])
            steps.append(logits is not None)
        return logits

    monkeypatch.setattr(DraftGraphs, "run", noting)
    with recorded_graphs():
        found = with_drafts(plain, model, "half", requests=requests, max_num_seqs=2)
    assert_same(found, plain, requests)
    assert all(steps == [False] + [True] * (len(steps) - 1) for steps in replayed.values())
    assert any(len(steps) > 1 for steps in replayed.values())


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


def kernel_of(shape, group):
    """What decides which kernels of attention a shape needs: the variant, its rows, the merge."""
    batch = shape.batches[0]
    rows, average = group * batch.short_rows, batch.splits // batch.sequences
    variant = decode_variant(torch.bfloat16, 128, rows, batch.splits, batch.sequences, streams=True)
    if variant.streamed:
        return streamed_form(variant, batch.sequences + 1)
    return batch.short_rows, variant, None if variant.fused else merge_chunk(average, 128)


@pytest.mark.parametrize("most", [1, 5, 20, 256])
def test_every_step_with_drafts_has_a_shape_with_room_and_compiled_kernels(most):
    draw, width, shapes = random.Random(1), 36, set()
    rehearsed = rehearsed_shapes(most, width)
    compiled = {group: {kernel_of(shape, group) for shape in rehearsed} for group in (2, 4)}
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
        assert all(kernel_of(shape, group) in kernels for group, kernels in compiled.items())
        shapes.add(shape)
    assert 5 < len(shapes) < 200


@pytest.mark.parametrize("tokens", [2, 4, 8, 16])
def test_a_draft_models_usual_steps_have_graphs_from_the_start(tokens):
    usual, most = usual_shapes(64, 32, 16), largest_shape(64, 32).words
    assert len(usual) == len({*usual}) <= 32
    for sequences in (1, 2, 4, 6, 11, 16):
        for start in (20, 1000):
            rows = plan_of([tokens] * sequences, [start] * sequences)
            shape = draft_shape(rows, sequences * tokens, 32)
            assert shape in usual and shape.words <= most
    assert {shape.batches[0].sequences for shape in usual_shapes(3, 32, 2)} == {1, 4}


def captures_of(model, requests, monkeypatch, **settings):
    """Graphs that an engine captures at its start, and those that requests need."""
    captures, at_start = [], []
    with recorded_graphs():
        capture = engine_graphs.GraphRoom.capture

        def counting(self, step, first):
            captures.append(step)
            return capture(self, step, first)

        with monkeypatch.context() as patch:
            patch.setattr(engine_graphs.GraphRoom, "capture", counting)

            def started(engine):
                at_start.append(len(captures))
                if engine.draft_model is not None:
                    still(engine)

            run(model, requests, look=False, change=started, **settings)
    return at_start[0], len(captures) - at_start[0]


def test_an_engine_with_a_draft_model_captures_nothing_for_its_drafts(tiny_model, monkeypatch):
    """What one without has at the start, and a few more; requests then find theirs."""
    model = tiny_model("qwen3", **TINY)
    requests = [ask("r", PROMPT[:40], max_tokens=20), ask("filtered", PROMPT[:40], top_p=0.9)]
    settings = {"max_num_seqs": 4, "max_model_len": 1024, "max_num_batched_tokens": 256}
    plain, none = captures_of(model, requests, monkeypatch, **settings)
    own = {"drafts": "auto", "draft_model": str(model)}
    with_model, late = captures_of(model, requests, monkeypatch, **settings, **own)
    assert none == late == 0
    assert 2 * plain < with_model < 2 * plain + 60


def test_memory_of_graphs_for_a_draft_models_drafts_is_no_kv_page():
    given = {"model": "m", "max_num_seqs": 64}
    assert engine_graphs.bytes_for_drafts(EngineConfig.from_values(**given), 8192, 1000) == 0
    config = EngineConfig.from_values(**given, draft_model="d")
    logits = 256 * 1000 * 4
    usual = len(usual_shapes(64, 32, 16))
    assert engine_graphs.bytes_for_drafts(config, 8192, 1000) >= logits + usual * 2**20


def test_only_steps_whose_rows_have_drafts_or_one_token_verify():
    verifies = lambda counts: plan_of(counts, [3] * len(counts)).verifies
    assert verifies([3, 1]) and not verifies([1, 1]) and not PlanRows.of([]).verifies
    prompt = Row(0, 0, 0, 0, (5, 6), (1,), (1,), 1, 1)
    assert not PlanRows.of([prompt]).verifies


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_replayed_steps_behind_unverified_drafts_change_no_bit(tiny_model, monkeypatch, tp):
    """Rows are moved in the packed step that a graph reads; no host waits for where they begin."""
    model, written, write = tiny_model("qwen3", **TINY), [], DraftMoves.write
    plain = run(model, ALL, look=False)

    def noting(self, ids, parts):
        write(self, ids, parts)
        written.extend(self.moved.tolist())

    monkeypatch.setattr(DraftMoves, "write", noting)
    monkeypatch.delattr(DraftMoves, "settle")
    with recorded_graphs():
        found = drafts_ahead(plain, model, "half", tp=tp)
    assert_same(found, plain, ALL)
    assert len(written) > 50 and {0, 1, 2} <= {*written}
