"""The engine's drafters: no bit depends on them, and what they save is counted."""

import logging

import msgspec
import pytest

from tests.engine.test_drafts import PROMPT, REQUESTS, SAMPLED, assert_same
from tests.lib.engine_harness import ask, draft_anew, leave_out_freely, run
from tpdet.config import EngineConfig
from tpdet.errors import UsageError
from tpdet.speculative.proposers.ngram import Ngram

# Biases make an answer that repeats itself, and one of two tokens in random order.
LOOPS = [
    ask("loop", PROMPT[:12], max_tokens=40, logprobs=1, logit_bias={5: 90.0}),
    ask("coins", PROMPT[:9], max_tokens=60, logprobs=0, logit_bias={3: 90.0, 4: 90.0}, **SAMPLED),
    ask("penalised", PROMPT[:15], max_tokens=30, logit_bias={7: 9.0}, presence_penalty=0.1),
]


def still(engine):
    """No time passes: what pays is decided by what is assumed of times."""
    draft_anew(engine, clock=lambda: 1.0)
    leave_out_freely(engine)


def counted(model, requests, into, **how):
    def watch(engine, _):
        into.update(engine.statistics().drafters)

    return run(model, requests, look=False, change=still, each_step=watch, **how)


@pytest.fixture(scope="module")
def plain(tiny_model):
    """Every answer without drafts."""
    return run(tiny_model("qwen3", kv_heads=2), [*REQUESTS, *LOOPS], look=False)


@pytest.mark.parametrize("how", [{}, {"ahead": True}, {"preempt_every": 5}], ids=str)
def test_ngrams_change_no_bit_and_save_steps(tiny_model, plain, how):
    model, counts = tiny_model("qwen3", kv_heads=2), {}
    requests = [*REQUESTS, *LOOPS] if not how else LOOPS
    found = counted(model, requests, counts, drafts="ngram", **how)
    assert_same(found, plain, requests)
    ngram = counts["ngram"]
    assert ngram.accepted_tokens > 20 and ngram.draft_tokens > ngram.drafts
    assert ngram.accepted_at[0] >= ngram.accepted_at[1] > 0
    assert sum(ngram.accepted_at) == ngram.accepted_tokens


def test_outputs_of_the_same_prompt_are_told_to_its_next_request(tiny_model, plain):
    model, counts = tiny_model("qwen3", kv_heads=2), {}
    first = REQUESTS[1]
    again = msgspec.structs.replace(first, request_id="again")
    found = counted(model, [first], counts, waves=[[again]], drafts="earlier")
    assert found.answer("again") == plain.answer("sampled")
    assert counts["earlier"].accepted_tokens > 10


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_drafter_that_fails_is_switched_off_and_answers_go_on(
    tiny_model, plain, monkeypatch, caplog, fault
):
    looks = []

    def failing(engine):
        now = [1.0]
        draft_anew(engine, clock=lambda: now[0])

        def match(self, tokens, end):
            looks.append(end)
            if fault == "raises":
                raise ZeroDivisionError("planted")
            now[0] += 30.0
            return 0

        monkeypatch.setattr(Ngram, "match", match)

    with caplog.at_level(logging.WARNING):
        found = run(
            tiny_model("qwen3", kv_heads=2), LOOPS, look=False, change=failing, drafts="auto"
        )
    assert_same(found, plain, LOOPS)
    assert len(looks) == 1
    said = [record.getMessage() for record in caplog.records if "switched off" in record.message]
    why = "raised ZeroDivisionError: planted" if fault == "raises" else "took 30.0 s"
    assert len(said) == 1 and f"drafter ngram {why}" in said[0]


def test_a_drafter_is_refused_where_rows_are_fixed_and_auto_is_none():
    for settings in ({"fixed_batch": 2}, {"approximate": True}):
        with pytest.raises(UsageError, match="drafts ngram and"):
            EngineConfig.from_values(model="m", drafts="ngram", **settings)
        assert EngineConfig.from_values(model="m", **settings).drafters == ()
    assert EngineConfig.from_values(model="m").drafters == ("schema", "ngram")


def wrong_for_ever(engine):
    """Every step takes as long as an H200's, and no draft is ever right."""
    draft_anew(engine, clock=lambda: 1.0)
    speculator = engine.scheduler.speculator
    observe = speculator.observe
    speculator.observe = lambda positions, synchronous, seconds: observe(
        positions, synchronous, (5.5 if synchronous else 4.4) * 1e-3 * (1 + 0.005 * positions)
    )


@pytest.mark.parametrize("tried", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_drafts_that_are_never_right_are_given_up(tiny_model, monkeypatch, tried):
    """A trial, which takes no step, is all there is of them; without it there are few."""
    asked = []
    monkeypatch.setattr(Ngram, "match", lambda self, tokens, end: 20)
    monkeypatch.setattr(Ngram, "propose", lambda self, most: asked.append(most) or [1099] * most)
    if not tried:
        monkeypatch.setattr("tpdet.speculative.speculator.UNTRIED", ("ngram",))
    model, counts = tiny_model("qwen3", kv_heads=2), {}
    request = ask("long", PROMPT[:30], max_tokens=60, logprobs=0, **SAMPLED)
    alone = run(model, [request], look=False)
    found = run(
        model,
        [request],
        look=False,
        ahead=True,
        change=wrong_for_ever,
        each_step=lambda engine, _: counts.update(engine.statistics().drafters),
        drafts="ngram",
    )
    assert_same(found, alone, [request])
    if tried:
        assert asked and not counts
    else:
        assert 0 < counts["ngram"].drafts <= 3 and not counts["ngram"].accepted_tokens
