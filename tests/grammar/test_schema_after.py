"""A schema behind a mark: before it nothing is masked, from the token behind it on all is."""

import json

import msgspec
import pytest

from tests.engine.test_drafts import assert_same, with_drafts
from tests.lib.engine_harness import ask, dictate_drafts, leave_out_freely, run
from tpdet.errors import RequestError
from tpdet.grammar.schema_start import SchemaStart
from tpdet.requests.request import SamplingParams, check_against_model
from tpdet.text.tokenizer import Tokenizer

jsonschema = pytest.importorskip("jsonschema")
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
MOST = 80
DRAWN = {"temperature": 1.0, "n": 2}
FREE = [
    ask("early", range(9), seed=1, max_tokens=MOST, logprobs=1, **DRAWN),
    ask("late", range(70), seed=2, max_tokens=MOST, logprobs=1, **DRAWN),
    ask("opened", range(30, 50), max_tokens=MOST, logprobs=1),
]
PLACES = {"early": 0, "late": 17, "opened": 5}  # of the mark's last id in the free answer


def changed(request, prompt=None, **fields):
    """The same request with other parameters, and perhaps another prompt."""
    params = msgspec.structs.replace(request.params, **fields)
    prompt = request.prompt_token_ids if prompt is None else tuple(prompt)
    return msgspec.structs.replace(request, params=params, prompt_token_ids=prompt)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", kv_heads=2)


@pytest.fixture(scope="module")
def free(model):
    return run(model, FREE)


@pytest.fixture(scope="module")
def questions(free):
    """The same requests with a schema behind a mark that choice 0 of the free answers has."""
    found = []
    for request in FREE:
        name = request.request_id
        output = free.tokens(name)
        begin = PLACES[name]
        while output[begin] in output[name == "opened" : begin]:
            begin += 1
        row = output[:1] if name == "opened" else []
        fields = {"json_schema": json.dumps(SCHEMA), "json_schema_after": [*row, output[begin]]}
        found.append(changed(request, **fields))
    return found


@pytest.fixture(scope="module")
def together(model, questions):
    return run(model, questions)


def begin_of(output, mark):
    """How many tokens are before the schema's; None if it never holds."""
    behind = len(mark) - 1
    return output.index(mark[-1], behind) + 1 if mark[-1] in output[behind:] else None


def as_asked_behind_the_mark(model, questions, found) -> bool:
    """Whether each answer goes on as one does whose prompt holds all up to the mark."""
    asked, begins = [], {}
    for request in questions:
        name = request.request_id
        begin = begins[name] = begin_of(found.tokens(name), request.params.json_schema_after)
        prompt = [*request.prompt_token_ids, *found.tokens(name)[:begin]]
        asked.append(changed(request, prompt, json_schema_after=(), max_tokens=MOST - begin))
    alone = run(model, asked)
    return all(found.answer(name)[begin:] == alone.answer(name) for name, begin in begins.items())


def test_all_up_to_the_mark_is_the_free_answer_and_all_behind_it_follows(
    model, free, questions, together
):
    tokenizer = Tokenizer.load(model)
    for request in questions:
        name, mark = request.request_id, request.params.json_schema_after
        for choice in range(request.params.n):
            answer, begin = together.answer(name, choice), begin_of(free.tokens(name, choice), mark)
            # The first token of "opened" has another mask, and the same bits beside it.
            assert answer[:begin] == free.answer(name, choice)[:begin]
            assert answer[begin][0] != free.tokens(name, choice)[begin]
            ids = together.tokens(name, choice)[begin:]
            jsonschema.validate(json.loads(tokenizer.decode(ids)), SCHEMA)
    assert as_asked_behind_the_mark(model, questions, together)


@pytest.mark.parametrize("late", [-1, 1])
def test_a_mask_one_token_early_or_late_would_be_seen(
    model, questions, together, monkeypatch, late
):
    """The control of the test above."""
    right = SchemaStart.begin

    def shifted(start, tokens, position):
        found = right(start, tokens, position)
        return None if found is None or position < found + late else found + late

    monkeypatch.setattr(SchemaStart, "begin", shifted)
    found = run(model, questions)
    assert all(found.answer(r.request_id) != together.answer(r.request_id) for r in questions)


@pytest.mark.parametrize(
    "how",
    [{"tp": 2, "ahead": True}, {"preempt_every": 5, "max_num_batched_tokens": 40}],
    ids=str,
)
def test_no_circumstance_reaches_the_answer(model, questions, together, how):
    found = run(model, questions, look="ahead" not in how, change=leave_out_freely, **how)
    assert found.preemptions > 0 or "preempt_every" not in how
    assert_same(found, together, questions)


@pytest.mark.parametrize(
    ("kind", "how"), [("half", {"preempt_every": 9}), ("perfect", {"tp": 2}), ("wrong", {})]
)
def test_drafts_across_the_mark_reach_no_answer(model, questions, together, kind, how):
    totals = []
    found = with_drafts(together, model, kind, totals, requests=questions, **how)
    assert_same(found, together, questions)
    assert totals[-1].draft_tokens > 40
    assert (totals[-1].accepted_draft_tokens > 20) == (kind != "wrong")


def test_a_mark_that_was_only_a_draft_is_none(model, questions, together):
    def change(engine):
        def marks(sequence, most):
            return [*sequence.request.params.json_schema_after[-1:], 1][:most]

        dictate_drafts(engine, marks)

    drafted = [msgspec.structs.replace(r, drafts=((1,),) * r.params.n) for r in questions]
    found = run(model, drafted, change=change, look=False)
    assert_same(found, together, questions)


def test_a_recorded_answer_is_verified_in_few_steps(model, questions, together):
    """As `tpdet check` and a resume do, also from the middle of reasoning and of JSON."""
    for cut in (2, -2, None):
        told = []
        for request in questions:
            known = range(request.params.n)
            drafts = tuple(tuple(together.tokens(request.request_id, i)[:cut]) for i in known)
            told.append(msgspec.structs.replace(request, drafts=drafts))
        found = run(model, told, look=False)
        assert_same(found, together, questions)
        assert cut == 2 or found.steps < together.steps / 4


def test_forced_text_is_drafted_behind_the_mark(model, questions, together):
    counts = {}
    found = run(
        model,
        questions,
        look=False,
        drafts="schema",
        each_step=lambda engine, _: counts.update(engine.statistics().drafters),
    )
    assert_same(found, together, questions)
    assert counts["schema"].accepted_tokens > 2


def test_an_answer_that_does_not_open_follows_from_its_first_token(model, questions):
    """The id that opens is allowed there, and is made unlikely here."""
    opened = questions[-1]
    first = opened.params.json_schema_after[0]
    unlikely = changed(opened, logit_bias={first: -100.0})
    wanted = changed(unlikely, json_schema_after=())
    assert run(model, [unlikely]).answer("opened") == run(model, [wanted]).answer("opened")


def test_an_answer_without_the_mark_is_a_free_one(model, free, questions):
    absent = next(
        i for i in range(1000) if i not in [*free.tokens("late"), *free.tokens("late", 1)]
    )
    found = run(model, [changed(questions[1], json_schema_after=[absent])])
    for choice in range(2):
        assert found.answer("late", choice) == free.answer("late", choice)


def test_an_end_before_the_mark_is_an_end(model, free, questions):
    """As in vLLM; `min_tokens` forbids it as anywhere."""
    late, output = questions[1], free.tokens("late")
    place = next(i for i in range(3, 17) if output[i] not in output[:i])
    ending = changed(late, ignore_eos=False, n=1)
    ending = msgspec.structs.replace(ending, eos_token_ids=(output[place],))
    last = run(model, [ending]).answer("late")[-1]
    assert (last[0], *last[3:]) == (output[place], "stop", output[place])
    longer = run(model, [changed(ending, min_tokens=place + 1)]).tokens("late")
    assert longer[:place] == output[:place] and longer[place] != output[place]


def test_what_is_no_mark_is_refused():
    for given in ({"json_schema_after": [1]}, {"json_schema": "{}", "json_schema_after": 3}):
        with pytest.raises(RequestError) as refused:
            SamplingParams(**given)
        assert refused.value.param == "json_schema_after"
    assert SamplingParams(json_schema="{}", json_schema_after=[]).json_schema_after == ()
    request = ask("x", [1], json_schema="{}", json_schema_after=[99])
    with pytest.raises(RequestError, match="99 in json_schema_after is outside"):
        check_against_model(request, 99, 100)
