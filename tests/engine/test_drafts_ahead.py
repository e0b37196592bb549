"""Rows that follow drafts which a step still verifies: they begin where a draft is wrong."""

import random

import msgspec
import pytest

from tests.engine.test_drafts import spoil_rows_behind_drafts
from tests.lib.engine_harness import ask, run
from tests.lib.some_slow import some_slow
from tpdet.engine.results import StepResults
from tpdet.runner.graphs import draft_moves
from tpdet.speculative.acceptance import AcceptanceRates
from tpdet.speculative.fixed import FixedSpeculator
from tpdet.speculative.speculator import DraftSpeculator

VOCABULARY = 1100
PROMPT = [(7 * i + i * i) % VOCABULARY for i in range(250)]
SAMPLED = {"temperature": 1.0, "seed": 7}
REQUESTS = [
    ask("greedy", PROMPT, max_tokens=30),
    ask("sampled", PROMPT[:33], max_tokens=28, logprobs=1, **SAMPLED),
    ask("top-p", PROMPT[5:30], max_tokens=28, logprobs=0, top_p=0.9, top_k=50, **SAMPLED),
    ask("choices", PROMPT[3:60], max_tokens=24, n=2, **SAMPLED),
]
ENDS = tuple(range(0, VOCABULARY, 9))
STOPPED = [
    ask(f"stop-{seed}", PROMPT[:40], max_tokens=40, stop_token_ids=ENDS, temperature=1.0, seed=seed)
    for seed in range(6)
]
ALL = REQUESTS + STOPPED


@pytest.fixture(scope="module")
def plain(tiny_model):
    """Every answer without drafts."""
    return run(tiny_model("qwen3", kv_heads=2), ALL, look=False)


class Plans:
    """Rows that followed unverified drafts, and how far they moved."""

    def __init__(self, patch):
        self.rows, self.moved = 0, []
        settle = draft_moves.settle_rows

        def watch(rows, sampled):
            found, moved = settle(rows, sampled)
            behind = rows.unverified > 0
            self.rows += int(behind.sum())
            self.moved += list(zip(moved[behind], rows.unverified[behind], strict=True))
            return found, moved

        patch.setattr(draft_moves, "settle_rows", watch)


def proposals(answers, kind, draw):
    """Drafts that are right, wrong, random, or right up to some position or but for one."""

    def dictate(sequence, most):
        right = answers[sequence.request_id, sequence.choice]
        output = len(sequence.tokens) - sequence.prompt_length
        told = right[output : output + min(most, draw.randrange(1, 7))]
        if kind == "right":
            return told
        if kind == "random":
            return [draw.randrange(VOCABULARY) for _ in told]
        if kind == "wrong":
            return [(token + 1) % VOCABULARY for token in told]
        place = draw.randrange(2 * len(told)) if told else 0
        return [(t + (i == place)) % VOCABULARY for i, t in enumerate(told)]

    return dictate


def with_drafts(plain, model, kind, requests=ALL, also=None, **how):
    choices = [(r.request_id, choice) for r in requests for choice in range(r.params.n)]
    answers = {key: plain.tokens(*key) for key in choices}
    drafted = [msgspec.structs.replace(r, drafts=((1,),) * r.params.n) for r in requests]

    def change(engine):
        dictate = proposals(answers, kind, random.Random(5))
        engine.scheduler.speculator = FixedSpeculator(dictate, follows=True)
        if also is not None:
            also(engine)

    return run(model, drafted, change=change, look=False, ahead=True, **how)


def assert_same(found, plain, requests=ALL):
    for request in requests:
        for choice in range(request.params.n):
            name = request.request_id, choice
            assert found.answer(*name) == plain.answer(*name), name


@pytest.mark.parametrize("kind", some_slow(["half"], ["half", "right", "wrong"]))
def test_rows_behind_unverified_drafts_have_every_bit(tiny_model, plain, monkeypatch, kind):
    plans = Plans(monkeypatch)
    found = with_drafts(plain, tiny_model("qwen3", kv_heads=2), kind)
    assert_same(found, plain)
    assert plans.rows > 30
    moved = {int(accepted) for accepted, _ in plans.moved}
    assert moved == {0} if kind == "wrong" else {0, 1, 2} <= moved or kind == "right"
    if kind == "right":
        assert all(accepted == unverified for accepted, unverified in plans.moved)
        assert found.steps < 0.6 * plain.steps
    reasons = {out[3] for request in STOPPED for out in found.answer(request.request_id)}
    assert {"stop", "length"} & reasons


WAYS = {
    "preempted": {"preempt_every": 5},
    "few-pages": {"kv_pages": 7},
    "chunked": {"max_num_batched_tokens": 30},
}


@pytest.mark.parametrize("way", some_slow(["preempted"], WAYS))
def test_however_steps_are_cut(tiny_model, plain, monkeypatch, way):
    plans = Plans(monkeypatch)
    found = with_drafts(plain, tiny_model("qwen3", kv_heads=2), "half", **WAYS[way])
    assert_same(found, plain)
    assert plans.rows > 5


def test_nan_at_a_position_before_a_row_is_computed_again(tiny_model, plain, monkeypatch):
    """The row behind stands for nothing: it began where a position had no token."""
    void, finish = [], StepResults.finish

    def noting(self):
        void.extend(self.step.void)
        finish(self)

    monkeypatch.setattr(StepResults, "finish", noting)
    model = tiny_model("qwen3", kv_heads=2)
    found = with_drafts(plain, model, "right", also=spoil_rows_behind_drafts)
    assert_same(found, plain)
    assert len(void) > 5


def test_whoever_is_aborted_while_a_row_follows_takes_nothing_from_the_others(tiny_model, plain):
    """At every step another request, whether rows of it are pending or not."""
    aborted = [request.request_id for request in STOPPED]

    def abort(engine, step):
        if step > 4 and aborted:
            engine.abort(aborted.pop())

    model = tiny_model("qwen3", kv_heads=2)
    found = with_drafts(plain, model, "half", each_step=abort)
    assert not aborted
    assert_same(found, plain, REQUESTS)
    for request in STOPPED:
        answer, whole = (it.answer(request.request_id) for it in (found, plain))
        assert [it[:2] for it in answer] == [it[:2] for it in whole[: len(answer)]]


class Knowing:
    """Proposes the answer, but for each token with a chance another."""

    name, is_spent = "knowing", False

    def __init__(self, answer, first, draw):
        self._answer, self._first, self._draw, self._end = answer, first, draw, 0

    def match(self, tokens, end):
        self._end = end - self._first
        return 64 if self._end < len(self._answer) else 0

    def propose(self, most):
        told = self._answer[self._end : self._end + most]
        return [token ^ (self._draw.random() < 0.2) for token in told]


def test_the_planner_lets_rows_follow_and_learns_of_both_kinds(tiny_model, plain, monkeypatch):
    plans, model = Plans(monkeypatch), tiny_model("qwen3", kv_heads=2)
    draw, rates, seen = random.Random(3), AcceptanceRates(), []

    def first(sequence):
        answer = plain.tokens(sequence.request_id, sequence.choice)
        return Knowing(answer, sequence.prompt_length, draw)

    def change(engine):
        names = engine.config.drafters
        made = DraftSpeculator(names, engine.run_ahead, clock=lambda: 1.0, rates=rates, first=first)
        engine.scheduler.speculator = made

    def watch(engine, _):
        seen.append(rates.rate_missed("knowing"))

    how = {"change": change, "each_step": watch, "ahead": True, "look": False}
    found = run(model, ALL, drafts="ngram", **how)
    assert_same(found, plain)
    assert plans.rows > 20 and found.steps < 0.8 * plain.steps
    assert seen[0] < 0.5 < seen[-1], "behind a wrong draft the others are right as often"
