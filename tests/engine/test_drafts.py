"""Drafts change no bit of an answer: whatever is proposed, and however steps are cut."""

import random

import msgspec
import pytest

import tpdet.engine.results as engine_results
import tpdet.scheduler.results as scheduler_results
from tests.lib.engine_harness import ask, dictate_drafts, leave_out_freely, run
from tests.lib.some_slow import some_slow
from tpdet.errors import IntegrityError, RequestError
from tpdet.scheduler import scheduler
from tpdet.scheduler.page_manager import PageManager
from tpdet.scheduler.rows import row_params

VOCABULARY = 1100
PROMPT = [(7 * i + i * i) % VOCABULARY for i in range(250)]
SAMPLED = {"temperature": 1.0, "seed": 7}
REQUESTS = [
    ask("greedy", PROMPT, max_tokens=20, logprobs=2),
    ask("sampled", PROMPT[:33], max_tokens=18, logprobs=0, **SAMPLED),
    ask("top-p", PROMPT[5:30], max_tokens=18, logprobs=1, top_p=0.9, top_k=50, **SAMPLED),
    ask(
        "penalties",
        PROMPT[:250:9],
        max_tokens=24,
        temperature=0.0,
        logprobs=1,
        repetition_penalty=1.3,
        frequency_penalty=0.7,
    ),
    ask(
        "stops",
        PROMPT[:40],
        max_tokens=30,
        min_tokens=6,
        stop_token_ids=tuple(range(0, VOCABULARY, 9)),
        logit_bias={5: 4.0, 9: 6.0},
        logprobs=1,
        **SAMPLED,
    ),
    ask("scored", PROMPT[:20], max_tokens=9, prompt_logprobs=1, logprobs=0),
    ask("choices", PROMPT[3:60], max_tokens=14, n=2, logprobs=0, **SAMPLED),
]


@pytest.fixture(scope="module")
def plain(tiny_model):
    """Every answer without drafts."""
    return run(tiny_model("qwen3", kv_heads=2), REQUESTS, look=False)


def proposals(answers, kind, draw):
    """A drafter that knows the answers: perfect, half right, wrong at every position, random."""

    def propose(sequence, most):
        right = answers[sequence.request_id, sequence.choice]
        output = len(sequence.tokens) - sequence.prompt_length
        length = min(most, draw.randrange(1, 7))
        if kind == "random":
            return [draw.randrange(VOCABULARY) for _ in range(length)]
        told = right[output : output + length]
        if kind == "half":
            place = draw.randrange(2 * len(told)) if told else 0
            return [(t + (i == place)) % VOCABULARY for i, t in enumerate(told)]
        return told if kind == "perfect" else [(t + 1) % VOCABULARY for t in told]

    return propose


def with_drafts(plain, model, kind, totals=None, requests=REQUESTS, **how):
    """The same requests with drafts of a kind; totals of the scheduler go to `totals`."""
    drafted = [msgspec.structs.replace(r, drafts=((1,),) * r.params.n) for r in requests]
    choices = [(r.request_id, choice) for r in requests for choice in range(r.params.n)]
    answers = {key: plain.tokens(*key) for key in choices}

    def change(engine):
        leave_out_freely(engine)
        dictate_drafts(engine, proposals(answers, kind, random.Random(3)))

    def watch(engine, _):
        if totals is not None:
            totals.append(engine.statistics().totals)

    return run(model, drafted, change=change, each_step=watch, look=False, **how)


def assert_same(found, plain, requests=REQUESTS):
    for request in requests:
        for choice in range(request.params.n):
            name = request.request_id, choice
            assert found.answer(*name) == plain.answer(*name), name
        assert found.prompt(request.request_id) == plain.prompt(request.request_id)


WAYS = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 30},
    "preempted": {"preempt_every": 3},
    "ahead": {"ahead": True},
}


@pytest.mark.parametrize("kind", ["perfect", "half", "wrong"])
def test_no_draft_changes_a_bit(tiny_model, plain, kind):
    totals = []
    found = with_drafts(plain, tiny_model("qwen3", kv_heads=2), kind, totals)
    assert_same(found, plain)
    assert totals[-1].draft_tokens > 50
    accepted = totals[-1].accepted_draft_tokens
    assert accepted == 0 if kind == "wrong" else accepted > 20
    assert kind != "perfect" or found.steps < 0.7 * plain.steps


@pytest.mark.parametrize("way", ["chunked", "preempted", "ahead"])
def test_half_right_drafts_change_no_bit_however_steps_are_cut(tiny_model, plain, way):
    totals, model = [], tiny_model("qwen3", kv_heads=2)
    found = with_drafts(plain, model, "half", totals, **WAYS[way])
    assert_same(found, plain)
    assert totals[-1].accepted_draft_tokens > 20
    assert (found.preemptions > 0) is (way == "preempted")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["perfect", "half", "wrong", "random"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("tp", [1, 2])
def test_drafts_of_every_kind_change_no_bit_at_any_size(tiny_model, plain, kind, way, tp):
    model = tiny_model("qwen3", kv_heads=2)
    assert_same(with_drafts(plain, model, kind, tp=tp, **WAYS[way]), plain)


def test_prefix_hits_on_pages_of_drafted_rows_change_no_bit(tiny_model, plain):
    """The second wave reads the page that the first one filled while drafts were refused."""
    model, first = tiny_model("qwen3", kv_heads=2), REQUESTS[0]
    told = PROMPT + plain.tokens("greedy")
    again = ask("again", told, max_tokens=4, logprobs=1)
    expected = run(model, [again], look=False)
    found = with_drafts(plain, model, "half", requests=[first], waves=[[again]])
    assert_same(found, plain, [first])
    assert found.answer("again") == expected.answer("again")
    assert found.hits[-1] == 256


def plant_blind_acceptance(patch):
    patch.setattr(scheduler_results, "follows_draft", lambda token, draft: True)


def plant_penalties_of_another_prefix(patch):
    def of_the_whole_row(sequence, end, known=None):
        how = row_params(sequence, end)
        ids = sequence.tokens[sequence.prompt_length :] if sequence.penalises else ()
        return how._replace(output_ids=ids)

    patch.setattr(engine_results, "row_params", of_the_whole_row)


def plant_failing_by_a_refused_position(patch):
    """Any position without a token fails the request, as one of a plain row does."""
    finish = engine_results.StepResults.finish

    def failing(self):
        finish(self)
        for sequence in self.step.sequences:
            wanted = self.step.drafted.get(sequence.key, 0)
            if wanted and len(self.runs.get(sequence.key, ())) <= wanted:
                self.failures[sequence.request_id] = "NaN"

    patch.setattr(engine_results.StepResults, "finish", failing)


@pytest.mark.parametrize("plant", [plant_blind_acceptance, plant_penalties_of_another_prefix])
def test_the_relation_finds_planted_faults(tiny_model, plain, monkeypatch, plant):
    plant(monkeypatch)
    model, requests = tiny_model("qwen3", kv_heads=2), REQUESTS[1:4]
    found = with_drafts(plain, model, "half", requests=requests)
    with pytest.raises(AssertionError):
        assert_same(found, plain, requests)


def plant_pages_past_the_committed_end(patch):
    """A row with drafts publishes every page that it has, though the last one is not full."""
    share = PageManager.share

    def past_the_end(self, sequence, end):
        share(self, sequence, sequence.room if sequence.waits else end)

    patch.setattr(PageManager, "share", past_the_end)
    patch.setattr(scheduler, "PAGE_TOKENS", 1)


def test_pages_that_are_published_past_the_committed_end_are_found(tiny_model, plain, monkeypatch):
    plant_pages_past_the_committed_end(monkeypatch)
    with pytest.raises(IntegrityError):
        with_drafts(plain, tiny_model("qwen3", kv_heads=2), "half", requests=REQUESTS[:1])


def with_own(request, drafts):
    return msgspec.structs.replace(request, drafts=(tuple(drafts),))


def spoil_rows_behind_drafts(engine):
    """Every last position of a row with drafts has NaN in its logits."""
    launch = engine.runner.launch

    def spoiling(plan, results):
        samples, ends = plan.rows.samples, plan.rows.logits.cumsum()
        places = [end - 1 for end, count in zip(ends, samples, strict=True) if count > 1]
        take = results.take

        def spoiled(block):
            logits = block.logits.clone()
            logits[[place - block.first for place in places]] = float("nan")
            return take(block._replace(logits=logits))

        results.take = spoiled
        return launch(plan, results)

    engine.runner.launch = spoiling


@pytest.mark.parametrize("planted", [False, True])
def test_nan_at_a_position_with_drafts_is_forgotten(tiny_model, plain, monkeypatch, planted):
    """It is computed again without drafts; a build in which it fails the request is found."""
    if planted:
        plant_failing_by_a_refused_position(monkeypatch)
    model, requests = tiny_model("qwen3", kv_heads=2), REQUESTS[:4]
    drafted = [with_own(request, plain.tokens(request.request_id)[:9]) for request in requests]
    found = run(model, drafted, change=spoil_rows_behind_drafts, look=False)
    if planted:
        assert all(found.failure(request.request_id) for request in requests)
    else:
        assert_same(found, plain, requests)


def test_own_drafts_are_followed_up_to_the_first_difference(tiny_model, plain):
    model, name = tiny_model("qwen3", kv_heads=2), "sampled"
    told, totals = plain.tokens(name), []
    request = with_own(REQUESTS[1], (*told[:12], 3, *told[13:]))
    found = run(
        model,
        [request],
        look=False,
        each_step=lambda engine, _: totals.append(engine.statistics().totals),
    )
    assert found.answer(name) == plain.answer(name)
    assert totals[-1].accepted_draft_tokens == 11, "the prompt's row samples the first token"
    assert found.steps == 1 + 1 + 5 + 1, "prompt, drafts, the rest one by one, and the heartbeat"


def test_a_prediction_guesses_every_choice_and_is_counted(tiny_model, plain):
    """Its place is found in both; where rows are fixed it is only a hint, and left out."""
    model, request = tiny_model("qwen3", kv_heads=2), REQUESTS[-1]
    told = [plain.tokens("choices", choice) for choice in range(2)]
    request = msgspec.structs.replace(request, prediction=(3, *told[0], *told[1]))
    found = run(model, [request], look=False, drafts="ngram")
    assert_same(found, plain, REQUESTS[-1:])
    assert found.steps < plain.steps
    for choice in range(2):
        rows = [o for o in found.outputs["choices"] if o.choice == choice and o.draft_tokens]
        assert 0 < sum(o.accepted_draft_tokens for o in rows) <= sum(o.draft_tokens for o in rows)
    hint = run(model, [request], look=False, fixed_batch=2, drafts="auto")
    assert_same(hint, plain, REQUESTS[-1:])
    assert not any(o.draft_tokens for o in hint.outputs["choices"])


def test_a_prediction_outside_the_vocabulary_or_context_is_refused(tiny_model):
    model = tiny_model("qwen3", kv_heads=2)
    for ids, why in (((VOCABULARY,), "1100 in prediction"), ((1,) * 1025, "prediction of 1025")):
        request = msgspec.structs.replace(ask("a", PROMPT[:30]), prediction=ids)
        with pytest.raises(RequestError, match=why):
            run(model, [request], max_model_len=1024)


@pytest.mark.parametrize(
    ("drafts", "settings", "why"),
    [
        (((1,), (2,)), {}, "2 drafts for 1 choices"),
        (((VOCABULARY,),), {}, "token id 1100 in drafts"),
        (((1,) * 1000,), {}, "plus drafts of 1000"),
        (((1,),), {"fixed_batch": 2}, "fixed_batch 2"),
        (((1,),), {"approximate": True}, "approximate mode"),
    ],
)
def test_drafts_that_cannot_be_verified_are_refused(tiny_model, drafts, settings, why):
    request = ask("a", PROMPT[:30], drafts=drafts)
    with pytest.raises(RequestError, match=why):
        run(tiny_model("qwen3", kv_heads=2), [request], max_model_len=1024, **settings)


def edited(ids):
    """A guess of ids with a changed, a removed and two inserted tokens."""
    away = VOCABULARY - 1
    return [*ids[:12], away, *ids[13:24], *ids[25:37], away, away, *ids[37:]]


@pytest.mark.parametrize("way", some_slow(["ahead"], ["whole", "ahead", "preempted"]))
def test_the_place_in_an_edited_guess_is_found_again(tiny_model, way):
    model = tiny_model("qwen3", kv_heads=2)
    requests = [ask("long", PROMPT[:30], max_tokens=60, logprobs=0, **SAMPLED)]
    alone = run(model, requests, look=False)
    right = alone.tokens("long", 0)
    steps = {}
    for name, guess in (
        ("edited", edited(right)),
        ("wrong", [(t + 1) % VOCABULARY for t in right]),
    ):
        drafted = [msgspec.structs.replace(requests[0], drafts=(tuple(guess),))]
        found = run(model, drafted, change=leave_out_freely, look=False, **WAYS[way])
        assert_same(found, alone, requests)
        steps[name] = found.steps
    assert steps["edited"] < 0.7 * steps["wrong"]
