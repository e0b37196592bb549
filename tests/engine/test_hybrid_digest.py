"""One digest of a hybrid's answers: sizes, batches, chunks, preemption, prefix hits, drafts."""

import pytest

from tests.conftest import HYBRIDS
from tests.lib.engine_harness import ask, run
from tests.lib.hybrid_answers import (
    BEHIND,
    CUTS,
    LONG,
    SHORT,
    asked,
    crowd,
    digest,
    drafted,
    left_behind,
)
from tests.lib.kernels.recorded_graphs import recorded_graphs
from tpdet.kernels import ops
from tpdet.kernels.order import CHUNK_TOKENS


@pytest.fixture(scope="module")
def hybrid(tiny_model):
    return tiny_model("qwen3_5_text", layers=2, kv_heads=2)


@pytest.fixture(scope="module")
def plain(hybrid):
    """The answer alone, its prompt in one step."""
    return run(hybrid, [asked()], dtype="bfloat16", **SHORT)


@pytest.mark.parametrize("budget", [65, pytest.param(1, marks=pytest.mark.slow)])
def test_chunks_of_a_prompt_change_no_bit(hybrid, plain, budget):
    found = run(hybrid, [asked()], dtype="bfloat16", max_num_batched_tokens=budget)
    assert digest(found) == digest(plain)


def test_two_ranks_a_batch_and_preemption_change_no_bit(hybrid, plain):
    found = crowd(hybrid, 3, tp=2, dtype="bfloat16", preempt_every=5, max_num_batched_tokens=200)
    assert found.preemptions > 1
    assert digest(found) == digest(plain)


def test_a_hit_ends_at_a_snapshot_and_changes_no_bit(hybrid, plain):
    """A prompt that shares 256 tokens, and one that goes on with the whole answer."""
    told = LONG[:300] + plain.tokens("a")
    waves = [[asked(LONG[:256] + LONG[:20], "other")], [asked(told, "on")], [asked(name="b")]]
    found = run(hybrid, [asked()], dtype="bfloat16", waves=waves, **SHORT)
    assert min(found.hits[1:]) >= 256
    assert digest(found, "b") == digest(plain, first=found.cached("b") - 1)
    alone = run(hybrid, [asked(told, "on")], dtype="bfloat16", **SHORT)
    assert digest(found, "on") == digest(alone, "on")


@pytest.fixture(scope="module")
def behind(hybrid):
    """The answer to a prompt that shares a page with others, alone."""
    return run(hybrid, [asked(BEHIND, "hits")], dtype="bfloat16", **SHORT)


@pytest.mark.parametrize("cut_from", [None, pytest.param(100, marks=pytest.mark.slow)])
def test_a_step_leaves_snapshots_behind_and_they_change_no_bit(hybrid, behind, cut_from):
    """By graphs, too, and in two micro-batches."""
    how = {"dtype": "bfloat16", **SHORT}
    if cut_from is None:
        found = left_behind(hybrid, **how)
    else:
        with recorded_graphs(cut_from) as replays:
            found = left_behind(hybrid, max_num_seqs=4, max_model_len=1024, **how)
        assert any(len(shape.batches) == 2 for shape in replays)
    assert digest(found, "hits") == digest(behind, "hits")
    assert digest(found, "again") == digest(found, "a")


def test_a_snapshot_whose_rows_are_one_late_is_found(hybrid, behind, monkeypatch):
    """The control: what a step leaves behind has the rows before its page end, not those after."""
    short_convolution = ops.short_convolution

    def late(x, weight, state, batch):
        for sequence in batch.sequences:
            for chunk, place in sequence.kept.items():
                tail = sequence.first_row + chunk * CHUNK_TOKENS - sequence.start
                late_rows[place - len(state.inputs)] = x[tail - 2 : tail + 1]
        y = short_convolution(x, weight, state, batch)
        for snapshot, rows in late_rows.items():
            state.tails[snapshot] = rows
        late_rows.clear()
        return y

    late_rows = {}
    monkeypatch.setattr(ops, "short_convolution", late)
    found = left_behind(hybrid, dtype="bfloat16", **SHORT)
    assert digest(found, "hits") != digest(behind, "hits")


@pytest.mark.parametrize(("right", "length"), [(200, 5), (0, 5), (2, 5)])
def test_right_wrong_and_half_right_drafts_change_no_bit(hybrid, plain, right, length):
    found = drafted(hybrid, plain.tokens("a"), right, length, dtype="bfloat16", **SHORT)
    assert found.answer("a") == plain.answer("a")


@pytest.mark.parametrize("cut_from", [None, pytest.param(100, marks=pytest.mark.slow)])
def test_graphs_change_no_bit(hybrid, plain, cut_from):
    """Steps replayed from buffers: prompts, decode rows, drafts, and what is preempted."""
    how = {"dtype": "bfloat16", "max_num_seqs": 4, "max_model_len": 512}
    with recorded_graphs(cut_from) as replays:
        found = crowd(hybrid, 3, preempt_every=5, max_num_batched_tokens=200, **how)
        told = drafted(hybrid, plain.tokens("a"), 4, 5, **how, **SHORT)
    assert digest(found) == digest(plain) and told.answer("a") == plain.answer("a")
    kinds = {(len(shape.batches), *(b.short_rows for b in shape.batches)) for shape in replays}
    assert kinds >= {(1, 1), (1, 16) if cut_from is None else (2, 1, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("length", [4, 63, 64, 65, 200])
def test_drafts_across_chunk_ends_change_no_bit(hybrid, length):
    """The first difference stands before, on and behind each chunk end that a run can cross."""
    prompt, tokens = LONG[: 3 * CHUNK_TOKENS - 6], 2 * CHUNK_TOKENS + 12
    request = ask("a", prompt, max_tokens=tokens, logprobs=0)
    expected = run(hybrid, [request], dtype="bfloat16", look=False, **SHORT)
    for right in (0, 4, 5, 6, 7, 68, 69, 70, 71, 1000):
        found = drafted(
            hybrid, expected.tokens("a"), right, length, prompt, tokens, dtype="bfloat16", **SHORT
        )
        assert found.answer("a") == expected.answer("a"), right


@pytest.fixture(scope="module")
def known(tiny_model):
    """A function of a family: a model of four layers, and its answer alone on one rank."""
    answers = {}

    def answer(family):
        model = tiny_model(family, layers=4, kv_heads=2)
        if family not in answers:
            answers[family] = run(model, [asked()], dtype="bfloat16", **SHORT)
        return model, answers[family]

    return answer


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("way", [*CUTS, "batch", "preempted"])
def test_one_digest_over_every_size_and_circumstance(known, family, tp, way):
    model, expected = known(family)
    how = {"tp": tp, "dtype": "bfloat16"}
    if way in CUTS:
        found = run(model, [asked()], max_num_batched_tokens=way, **how)
    else:
        preempting = {"preempt_every": 4} if way == "preempted" else {}
        found = crowd(model, max_num_batched_tokens=200, **preempting, **how)
        assert (found.preemptions > 2) is (way == "preempted")
    assert digest(found) == digest(expected)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", HYBRIDS)
def test_snapshots_that_a_step_leaves_behind_change_no_bit_at_any_size(known, family, tp):
    model, _ = known(family)
    alone = [run(model, [asked(prompt)], dtype="bfloat16", **SHORT) for prompt in (BEHIND, LONG)]
    found = left_behind(model, tp=tp, dtype="bfloat16", **SHORT)
    assert digest(found, "hits") == digest(alone[0])
    assert digest(found, "again") == digest(found, "a") == digest(alone[1])


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize(("right", "length"), [(200, 4), (0, 4), (2, 5), (200, 64)])
def test_drafts_change_no_bit_at_any_size(known, family, tp, right, length):
    model, expected = known(family)
    answer = expected.tokens("a")
    found = drafted(model, answer, right, length, tp=tp, dtype="bfloat16", **SHORT)
    assert found.answer("a") == expected.answer("a")


def test_a_state_kept_a_row_late_is_found(hybrid, plain, monkeypatch):
    """The control: an advance that leaves the last row of a chunk out gives another digest."""
    gated_delta = ops.gated_delta

    def late(*args):
        state = args[-2]
        state.decays[:, CHUNK_TOKENS - 1] = 0
        return gated_delta(*args)

    monkeypatch.setattr(ops, "gated_delta", late)
    found = run(hybrid, [asked()], dtype="bfloat16", max_num_batched_tokens=64)
    assert digest(found) != digest(plain)
