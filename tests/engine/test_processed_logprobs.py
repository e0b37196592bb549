"""Processed log-probabilities have one request's bits at any size, beside others, and by drafts."""

from functools import partial

import msgspec
import pytest

from tests.lib.engine_harness import ask, dictate_drafts, run
from tests.lib.some_slow import some_slow

pytestmark = pytest.mark.long

PROMPT = [(7 * i + i * i) % 1024 for i in range(300)]
WAYS = {
    "temperature": {"temperature": 0.7, "logprobs": 0},
    "plain": {"temperature": 1.0, "logprobs": 2},
    "top-k": {"temperature": 1.2, "top_k": 2, "logprobs": 3},
    "both": {"temperature": 0.8, "top_k": 40, "top_p": 0.7, "min_p": 0.02, "logprobs": 1},
    "greedy": {"temperature": 0.0, "logprobs": 1},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5,
                  "logit_bias": {5: 3.0}, "logprobs": 1},
}  # fmt: skip
PLAIN = ("temperature", "plain", "top-k", "both", "greedy")
MODE = {"logprobs_mode": "processed_logprobs"}


def requests(names=tuple(WAYS)):
    return [
        ask(name, PROMPT[i : i + 270 if i == 0 else 20 + 9 * i], seed=i, max_tokens=4, **WAYS[name])
        for i, name in enumerate(WAYS)
        if name in names
    ]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", kv_heads=2)


@pytest.fixture(scope="module")
def alone(model):
    """Each request alone at one rank: one when the one before is done, without its pages."""
    waves = [[request] for request in requests()]
    return run(model, [], waves=waves, look=False, enable_prefix_caching=False, **MODE).outputs


def same_outputs(outputs, alone, names=tuple(WAYS)):
    for name in names:
        shown = [(o.token_id, o.logprob, o.top, o.rank, o.finish_reason) for o in outputs[name]]
        known = [(o.token_id, o.logprob, o.top, o.rank, o.finish_reason) for o in alone[name]]
        assert repr(shown) == repr(known), name


def test_the_mode_changes_the_numbers_of_changed_rows_alone(model, alone):
    found = run(model, requests(), look=False).outputs
    for name in WAYS:
        assert [o.token_id for o in found[name]] == [o.token_id for o in alone[name]]
        equal = [o.logprob for o in found[name]] == [o.logprob for o in alone[name]]
        assert equal == (name in ("plain", "greedy")), name
    same_outputs(found, alone, ("plain", "greedy"))
    assert all(len(o.top) == 2 for o in alone["top-k"])


@pytest.mark.parametrize(
    ("tp", "preempt_every"), some_slow({(2, 3)}, [(1, 0), (2, 3), (4, 0), (8, 3)])
)
def test_a_crowd_at_any_size_gives_the_bits_of_one_alone(model, alone, tp, preempt_every):
    found = run(model, requests(), tp=tp, preempt_every=preempt_every, look=False, **MODE)
    same_outputs(found.outputs, alone)
    assert bool(found.preemptions) == bool(preempt_every)


@pytest.mark.parametrize("names", [("temperature", "plain", "greedy"), PLAIN], ids=len)
def test_ranks_that_sample_together_give_the_same(model, alone, names):
    """By columns where no row has top-k or top-p, by shares where one has."""
    settings = MODE | {"share_draws": "on", "max_num_batched_tokens": 60}
    found = run(model, requests(names), tp=2, ahead=True, look=False, **settings)
    same_outputs(found.outputs, alone, names)


@pytest.mark.parametrize("wrong", [False, True])
def test_drafts_that_are_taken_or_not_change_no_bit(model, alone, wrong):
    tokens = {name: [o.token_id for o in outputs] for name, outputs in alone.items()}

    def dictate(sequence, most):
        after = len(sequence.tokens) - sequence.prompt_length
        drafts = tokens[sequence.request_id][after : after + min(most, 3)]
        return [(token + 1) % 1024 for token in drafts] if wrong else drafts

    def watch(engine, _):
        totals.append(engine.statistics().totals)

    totals = []
    drafted = [msgspec.structs.replace(request, drafts=((1,),)) for request in requests()]
    change = partial(dictate_drafts, dictate=dictate)
    found = run(model, drafted, look=False, change=change, each_step=watch, **MODE)
    same_outputs(found.outputs, alone)
    assert totals[-1].draft_tokens > 10
    assert (totals[-1].accepted_draft_tokens > 10) != wrong


def test_a_prefix_that_is_read_from_the_cache_changes_no_bit(model, alone):
    first = requests(("temperature",))
    again = [ask("again", first[0].prompt_token_ids, seed=0, max_tokens=4, **WAYS["temperature"])]
    found = run(model, first, waves=[again], look=False, **MODE)
    assert found.cached("again") >= 256
    known = [(o.token_id, o.logprob, o.top, o.rank) for o in alone["temperature"]]
    assert [(o.token_id, o.logprob, o.top, o.rank) for o in found.outputs["again"]] == known
