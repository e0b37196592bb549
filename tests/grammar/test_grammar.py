"""JSON schemas as masks: a function of the tokens so far; what cannot be used is refused."""

import json
import random
import re
import time

import pytest
import torch

from tests.engine.test_drafts import assert_same, with_drafts
from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, leave_out_freely, run
from tests.lib.server.harness import write_tokenizer
from tpdet.errors import RequestError
from tpdet.grammar import trial
from tpdet.grammar.constraint import Grammars
from tpdet.kernels.cpu.sampling.tokens import choose_token
from tpdet.kernels.cuda.sampling.penalties import penalise
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.requests.answer_form import AnswerForm
from tpdet.requests.field_ranges import MAX_SCHEMA_BYTES
from tpdet.requests.request import SamplingParams
from tpdet.text.outputs import RequestAssembler
from tpdet.text.tokenizer import Tokenizer

jsonschema = pytest.importorskip("jsonschema")
V = 512
EOS = 258
BOUNDED = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 3},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["cat", "dog", 'quo"te', "é"]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-f]{3}$"}]},
    {
        "$ref": "#/$defs/pair",
        "$defs": {
            "pair": {
                "type": "array",
                "prefixItems": [{"const": 1}, {"type": "boolean"}],
                "items": False,
                "minItems": 2,
            }
        },
    },
)


def text(schema) -> str:
    return json.dumps(schema)


def form(schema) -> AnswerForm:
    return AnswerForm("json_schema", text(schema))


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    write_tokenizer(folder)
    return Grammars(Tokenizer.load(folder), V)


def ids(mask: bytes) -> list[int]:
    return [i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1]


def test_the_end_is_allowed_where_the_text_is_complete_and_nothing_special_ever(grammars):
    found = grammars.constrain(form({"type": "integer"}))
    assert not found.next_ids(b"-", [EOS]).complete
    after = found.next_ids(b"12", [EOS])
    assert after.complete and ids(after.allowed) == [*b"0123456789", EOS]
    assert ids(found.next_ids(b"12", [], [*b"1"]).allowed) == [*b"023456789"]
    words = grammars.constrain(form({"type": "string"}))
    assert max(ids(words.next_ids(b'"', [EOS]).allowed)) < 256


def test_a_mask_is_the_same_from_the_start_and_step_by_step(grammars):
    draw = random.Random(3)
    for schema in BOUNDED:
        grown = grammars.constrain(form(schema))
        output: list[int] = []
        while True:
            found = grown.next_ids(output, [EOS])
            assert grammars.constrain(form(schema)).next_ids(output, [EOS]) == found
            if draw.random() < 0.2:
                grown.forget()
            token = draw.choice(ids(found.allowed))
            if token == EOS:
                break
            output.append(token)
        jsonschema.validate(json.loads(bytes(output)), schema)


def test_answers_are_compact_unless_the_schema_says_otherwise(grammars):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for options in ({}, {"x-guidance": {}}, {"x-guidance": {"whitespace_flexible": False}}):
        found = grammars.constrain(form(schema | options))
        assert ids(found.next_ids(b"{", [EOS]).allowed) == [ord('"')]
        assert ids(found.next_ids(b'{"a"', [EOS]).allowed) == [ord(":")]
        assert not {*b" \n\t"} & {*ids(found.next_ids(b'{"a":1', [EOS]).allowed)}
    flexible = grammars.constrain(form(schema | {"x-guidance": {"whitespace_flexible": True}}))
    assert ord(" ") in ids(flexible.next_ids(b"{", [EOS]).allowed)


def test_blanks_come_to_an_end(grammars):
    options = {"x-guidance": {"whitespace_flexible": True}}
    found = grammars.constrain(form({"type": "array"} | options))
    assert ids(found.next_ids(b"[" + 39 * b" ", [EOS]).allowed).count(32) == 1
    assert 32 not in ids(found.next_ids(b"[" + 40 * b" ", [EOS]).allowed)


def test_a_dead_end_is_seen(grammars):
    found = grammars.constrain(form({"const": True}))
    done = found.next_ids(b"true", [])
    assert done.dead and done.complete
    stuck = found.next_ids(b"t", [EOS], b"r")
    assert stuck.dead and not stuck.complete
    with pytest.raises(RequestError, match="too complex"):
        found.next_ids(b"x", [EOS])  # never drawn: what the library refuses is not used


@pytest.mark.parametrize(
    "schema",
    [
        "{", "3", "[]", '"x"', "true", '{"type": "robot"}', '{"not": {}}', '{"$ref": "http://x/y"}',
        '{"$ref": "#"}', '{"$ref": "#/nothing"}', '{"type": "string", "pattern": "(a"}',
        '{"type": "string", "pattern": "(?=a)b"}', '{"uniqueItems": true, "type": "array"}',
        '{"type": "integer", "minimum": 5, "maximum": 3}', '{"enum": []}',
        '{"x-guidance": {"lenient": true}}', '{"x-guidance": {"whitespace_flexible": 1}}',
        '{"x-guidance": 3}', '{"allOf": [{"type": "null"}, {"type": "string"}]}',
        '{"properties": []}', '{"minLength": 3, "maxLength": 1, "type": "string"}',
    ],
)  # fmt: skip
def test_what_is_no_schema_or_not_known_is_refused(grammars, schema):
    with pytest.raises(RequestError) as refused:
        grammars.constrain(AnswerForm("json_schema", schema))
    assert refused.value.param == "response_format" and len(str(refused.value)) < 300
    with pytest.raises(RequestError):
        trial.check(AnswerForm("json_schema", schema))


def test_a_schema_that_compiles_for_ever_is_refused_in_time():
    endless = {"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(40)]}
    began = time.monotonic()
    with pytest.raises(RequestError, match="too complex"):
        trial.check(form(endless))
    assert time.monotonic() - began < 20
    trial.check(form(BOUNDED[0]))


def test_a_schema_at_the_limit_is_taken_and_one_byte_more_is_not():
    schema = text({"description": ""})
    full = text({"description": "x" * (MAX_SCHEMA_BYTES - len(schema))})
    SamplingParams(json_schema=full)
    trial.check(AnswerForm("json_schema", full))
    for wrong in (full + " ", full * 100, b"{}", 3, {}):
        with pytest.raises(RequestError):
            SamplingParams(json_schema=wrong)


@pytest.mark.parametrize("width", [V, 509, 200])
def test_both_devices_code_applies_a_mask_by_select(width):
    draw = random.Random(width)
    logits = torch.linspace(-3.0, 3.0, V)[None].clone()
    logits[0, 7] = torch.inf
    mask = bytes(draw.randrange(256) for _ in range(V // 8))
    how = RowParams(temperature=0.0, seed=1, position=2, allowed=mask, bias={3: 1.0})
    rows = logits[:, 100 : 100 + width].repeat(2, 1)
    penalise(rows, [RowParams(temperature=0.0, seed=1, position=2), how], first_id=100)
    expected = logits[0, 100 : 100 + width].clone()
    expected[[i for i in range(len(expected)) if 100 + i not in ids(mask)]] = -torch.inf
    assert_same_bits(rows[1], expected, "masked")
    assert_same_bits(rows[0], logits[0, 100 : 100 + width], "the row beside it")
    wanted = [i for i in ids(mask) if i != 7]
    logits[0, 7] = 0.0
    assert choose_token(logits[0], how) == max(wanted, key=lambda i: (logits[0, i], -i))
    assert (
        choose_token(logits[0], RowParams(temperature=1.0, seed=1, position=2, allowed=bytes(64)))
        < 0
    )


def questions():
    """Constrained and free requests, greedy and drawn."""
    made = [ask("free", range(30, 50)), ask("warm", range(9), temperature=1.0, seed=2)]
    for place, schema in enumerate(BOUNDED):
        made.append(
            ask(
                f"s{place}",
                range(20 + place),
                temperature=1.0,
                seed=place,
                n=2,
                max_tokens=160,
                ignore_eos=False,
                json_schema=text(schema),
                logprobs=1,
            )
        )
    wanted = {"regex": r"(?:[a-f]{2}/\d,){2,4}é?"}, {"choice": ["a.b", "a.bc", "日本"]}
    for place, outputs in enumerate(wanted):
        drawn = {"temperature": 1.0, "n": 2, "ignore_eos": False, "logprobs": 1}
        drawn |= {"structured_outputs": outputs, "max_tokens": 80}
        made.append(ask(f"r{place}", range(25 + place), seed=place, **drawn))
    made.append(
        ask(
            "greedy",
            range(300),
            max_tokens=160,
            json_schema=text(BOUNDED[0]),
            presence_penalty=0.5,
            prompt_logprobs=0,
        )
    )
    return made


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", kv_heads=2)


@pytest.fixture(scope="module")
def together(model):
    return run(model, questions())


def names(requests):
    return [(r.request_id, choice) for r in requests for choice in range(r.params.n)]


def test_every_answer_of_a_random_model_follows_its_schema(model, together):
    tokenizer = Tokenizer.load(model)
    for request in questions()[2:]:
        whole = RequestAssembler(request, tokenizer)
        for output in together.outputs[request.request_id]:
            whole.push(output)
        for choice in whole.answer().choices:
            assert choice.finish_reason == "stop", choice.text
            wanted = request.params.form
            if wanted.kind == "regex":
                assert re.fullmatch(wanted.text, choice.text), choice.text
            else:
                jsonschema.validate(json.loads(choice.text), json.loads(wanted.text))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [("half", {}), ("wrong", {}), ("perfect", {"tp": 2})])
def test_drafts_reach_no_constrained_answer(model, together, kind, how):
    """Drafts that a schema forbids are cut, and a mask counts the tokens of its own prefix."""
    totals = []
    found = with_drafts(together, model, kind, totals, requests=questions(), **how)
    assert_same(found, together, questions())
    accepted = totals[-1].accepted_draft_tokens
    assert accepted == 0 if kind == "wrong" else accepted > 20


def test_what_a_schema_forces_is_drafted_and_reaches_no_answer(model, together):
    counts = {}
    found = run(
        model,
        questions(),
        look=False,
        drafts="schema",
        each_step=lambda engine, _: counts.update(engine.statistics().drafters),
    )
    assert_same(found, together, questions())
    assert counts["schema"].accepted_tokens > 5


def test_a_mask_after_tokens_were_taken_back_is_that_of_the_tokens(grammars):
    """Drafts go and come: the matcher rolls back, or begins again."""
    draw = random.Random(5)
    constraint = grammars.constrain(form(BOUNDED[0]))
    output = []
    for _ in range(60):
        alone = grammars.constrain(form(BOUNDED[0]))
        found = constraint.next_ids(output, (EOS,))
        assert found == alone.next_ids(output, (EOS,))
        constraint.forced_ids(output)
        ids = [i for i in range(V) if found.allowed[i >> 3] >> (i & 7) & 1 and i != EOS]
        if ids and draw.random() < 0.7:
            output = [*output, draw.choice(ids)]
        else:
            output = output[: draw.randrange(len(output) + 1)]


def test_who_asks_for_no_schema_keeps_his_bits(model, together):
    free = run(model, questions()[:2])
    for name in ("free", "warm"):
        assert free.answer(name) == together.answer(name)


@pytest.mark.parametrize(
    "how",
    [
        {"tp": 2, "ahead": True},
        {"preempt_every": 9, "max_num_batched_tokens": 40},
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ({"tp": 2}, {"ahead": True}, {"preempt_every": 3}, {"max_num_seqs": 2})
        ),
    ],
    ids=str,
)
def test_no_circumstance_reaches_a_constrained_answer(model, together, how):
    ahead = "ahead" in how
    found = run(model, questions(), look=not ahead, change=leave_out_freely, **how)
    assert found.preemptions > 0 or "preempt_every" not in how
    for name, choice in names(questions()):
        assert found.answer(name, choice) == together.answer(name, choice), name


def test_alone_as_in_a_crowd(model, together):
    for request in questions()[3:5]:
        found = run(model, [request])
        for name, choice in names([request]):
            assert found.answer(name, choice) == together.answer(name, choice)


def test_a_complete_text_ends_although_no_end_token_may_come(model):
    bare = {"max_tokens": 50, "json_schema": text({"const": [1, 2]}), "temperature": 1.0, "seed": 1}
    found = run(model, [ask("a", range(5), **bare), ask("b", range(5), min_tokens=50, **bare)])
    for name in "ab":
        last = found.outputs[name][-1]
        assert (last.finish_reason, last.stop_token_id, last.dead_end) == ("stop", None, False)


def test_a_dead_end_ends_with_a_clear_finish(model):
    tokenizer = Tokenizer.load(model)
    ends = [i for i in range(1100) if tokenizer.token_text(i) in ("e", "ue", "rue", "true")]
    request = ask(
        "x",
        range(5),
        max_tokens=50,
        min_tokens=50,
        stop_token_ids=tuple(ends),
        json_schema=text({"const": True}),
    )
    outputs = run(model, [request]).outputs["x"]
    whole = RequestAssembler(request, tokenizer)
    for output in outputs:
        whole.push(output)
    (choice,) = whole.answer().choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("tru", "length", "grammar")


def test_an_unusable_schema_never_enters_the_queue(model):
    def refuse(engine):
        for schema in ('{"type": "robot"}', "{"):
            with pytest.raises(RequestError):
                engine.submit(ask("bad", range(5), json_schema=schema))
        assert not engine.has_work

    run(model, [ask("free", range(5), max_tokens=2)], waves=[refuse])
    with pytest.raises(RequestError, match="tokenizer"):
        run(model, [ask("x", range(5), json_schema='{"type":"object"}')], skip_tokenizer_init=True)
