"""Tool calls as grammars: whatever is drawn, the family's parser reads valid calls of it."""

import json
import random
import time

import pytest

from tests.engine.test_drafts import assert_same
from tests.grammar.grammar_walks import walk as walk_bytes
from tests.lib.engine_harness import ask, run
from tests.lib.server.harness import write_tokenizer
from tpdet.errors import RequestError
from tpdet.grammar import trial
from tpdet.grammar.byte_texts import byte_vocabulary
from tpdet.grammar.compile import compile_form
from tpdet.grammar.constraint import Grammars
from tpdet.grammar.layouts import LAYOUTS, layout_of
from tpdet.grammar.tool_calls import CallForm, form_of_calls
from tpdet.requests.answer_form import AnswerForm, check_form
from tpdet.requests.field_ranges import MAX_TOOL_BYTES
from tpdet.requests.tools import read_tools
from tpdet.text.detokenizer import IncrementalDetokenizer
from tpdet.text.outputs import RequestAssembler
from tpdet.text.parsing.calls import CallParser, output_parser
from tpdet.text.parsing.events import Message
from tpdet.text.parsing.family import FAMILIES
from tpdet.text.parsing.reasoning import ReasoningParser
from tpdet.text.tokenizer import Tokenizer

jsonschema = pytest.importorskip("jsonschema")
V, EOS = 512, 258
TOOLS = {
    "look_up": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 4},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 20},
            "spot": {"$ref": "#/$defs/point"},
            "note": {"anyOf": [{"type": "string", "pattern": "^[a-c]{2}$"}, {"type": "null"}]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {
            "point": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
        },
    },
    "stop-it.now": {"type": "object", "properties": {}, "additionalProperties": False},
}


def form(layout, required=True, parallel=True, tools=TOOLS):
    return AnswerForm("tool_calls", CallForm(layout, required, parallel, tools).text)


def walk(constraint, draw, marks, most):
    """The ids of one answer; ended where it may end, or cut short."""
    output = []
    while len(output) < most:
        following = constraint.next_ids(output, [EOS])
        ids = [i for i in range(V) if following.allowed[i >> 3] >> (i & 7) & 1]
        assert ids, bytes(i for i in output if i < 256)
        if EOS in ids and (ids == [EOS] or draw.random() < 0.2):
            return output, True
        ids = [i for i in ids if i != EOS]
        likely = [i for i in ids if i in marks]
        output.append(draw.choice(likely if likely and draw.random() < 0.5 else ids))
    return output, False


def texts_of(tokenizer, output):
    """What the detokenizer gives for each token."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    return [detokenizer.push(token) for token in output]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_walk_is_valid_calls(tmp_path, layout):
    tools = {name: schema for name, schema in TOOLS.items() if LAYOUTS[layout].prints(name)}
    write_tokenizer(tmp_path, marks=LAYOUTS[layout].marks)
    tokenizer, draw = Tokenizer.load(tmp_path), random.Random(7)
    grammars, marks = Grammars(tokenizer, V), {*tokenizer.added_tokens.values()}
    family = layout.split(" ")[0]
    parser = CallParser({"phi4_mini": "phi4_mini_json"}.get(family, family), tokenizer)
    reasoning = ReasoningParser.of("harmony" if family == "harmony" else "off", tokenizer)
    prompt = [tokenizer.added_tokens["<|start|>"], *b"assistant"] if reasoning else []
    calls = 0
    for required, parallel in ((True, True), (True, False), (False, True), (False, False)):
        constraint = grammars.constrain(form(layout, required, parallel, tools))
        for _ in range(3):
            output, ended = walk(constraint, draw, marks, 300)
            reader = output_parser(tokenizer, prompt, reasoning, parser, TOOLS)
            events = [*reader.feed(output, texts_of(tokenizer, output)), *reader.finish()]
            message = Message.of(events)
            assert not (ended and required) or message.calls, tokenizer.decode(output, False)
            assert parallel or len(message.calls) <= 1
            for call in message.calls:
                jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
            calls += len(message.calls)
    assert calls > 2


def test_a_mark_that_is_a_token_is_never_its_letters(tmp_path):
    write_tokenizer(tmp_path, marks=LAYOUTS["hermes"].marks)
    tokenizer = Tokenizer.load(tmp_path)
    opening = tokenizer.added_tokens["<tool_call>"]
    free = Grammars(tokenizer, V).constrain(form("hermes", required=False))

    def allowed(output, token):
        following = free.next_ids(output, [EOS])
        return bool(following.allowed[token >> 3] >> (token & 7) & 1)

    assert allowed(b"<tool_call>", ord("x")) and allowed(b"<tool_call>", EOS)
    assert allowed(b"hi", opening) and not allowed([opening], ord("x"))
    assert allowed([opening], ord("\n")) and not allowed([opening], EOS)
    assert not allowed(b"", tokenizer.added_tokens["</tool_call>"])


@pytest.mark.parametrize("layout", ["hermes", "llama3_json", "harmony"])
def test_an_answer_is_calls_or_json(tmp_path, layout):
    write_tokenizer(tmp_path, marks=LAYOUTS[layout].marks)
    tokenizer = Tokenizer.load(tmp_path)
    content = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = CallForm(layout, False, True, TOOLS, content).text
    assert CallForm.of(text).content == content
    holds = Grammars(tokenizer, V).constrain(AnswerForm("tool_calls", text))
    head = "<|channel|>final<|message|>" if layout == "harmony" else ""
    answer = tokenizer.encode(head + '{"a":12}', add_special_tokens=False)
    for end in range(len(answer)):
        following = holds.next_ids(answer[:end], [EOS])
        assert following.allowed[answer[end] >> 3] >> (answer[end] & 7) & 1, end
        assert not following.complete
    assert holds.next_ids(answer, [EOS]).complete


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def use(choice=None, parallel=None, **more):
    tools = [{"type": "function", "function": TOOL | more}]
    return read_tools([*tools, {"type": "function", "function": {"name": "g"}}], choice, parallel)


def test_only_what_has_to_be_right_follows_a_grammar():
    named = {"type": "function", "function": {"name": "f"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    assert form_of_calls(use(), "hermes") is None
    cases = {
        (True, True, True): use("required"),
        (True, False, True): use(named),
        (False, True, True): use(strict=True),
        (False, True, False): use(allowed),
        (False, False, False): use(parallel=False),
    }
    for (required, parallel, schema), asked in cases.items():
        found = CallForm.of(form_of_calls(asked, "hermes"))
        assert (found.required, found.parallel) == (required, parallel)
        assert (found.schemas["f"] is not None) == schema
        assert ("g" in found.schemas) == (asked.allowed == ("f", "g"))


@pytest.mark.parametrize(
    ("layout", "asked", "message"),
    [
        ("qwen3_coder", use("required", name="a b"), "tool name 'a b' cannot be printed"),
        ("olmo3", use(name="a-b"), "'a-b' cannot be printed in calls of olmo3"),
        ("olmo3", use(name="a.class"), "cannot be printed in calls of olmo3"),
    ],
)
def test_what_a_family_cannot_print_is_refused(layout, asked, message):
    with pytest.raises(RequestError, match=message) as refused:
        form_of_calls(asked, layout)
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("layout", "schema", "message"),
    [
        ("hermes", {"type": "array"}, "tool 'f': type 'array' is no object"),
        ("hermes", {"properties": {"a": {"not": {}}}}, "tool 'f': .*a/not is not supported"),
        ("hermes", {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "tool 'f'"),
        ("hermes", {"$ref": "#"}, "tool 'f': no text has this form: a .ref that leads to itself"),
        ("hermes", {"properties": {"a": {"$ref": "#/nothing"}}}, "tool 'f'"),
        ("olmo3", {"properties": {"is": {}}}, "tool 'f': 'is' is no name of Python's"),
        ("qwen3_coder", {"anyOf": [{}]}, "tool 'f': anyOf at its top is not followed"),
        ("qwen3_coder", {"properties": []}, "tool 'f': properties must be an object"),
        ("qwen3_coder", {"properties": {"<a": {}}}, "tool 'f': '<a' cannot be printed as a key"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "enum": "b"}}}, "enum is 'b'"),
        ("qwen3_coder", {"required": ["a"]}, "properties lack the required 'a'"),
        ("qwen3_coder", {"required": [["a"]]}, r"properties lack the required \['a'\]"),
        (
            "qwen3_coder",
            {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
            "pattern .*look-around",
        ),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_tool(layout, schema, message):
    wrong, marks = form(layout, tools={"g": {"type": "object"}, "f": schema}), LAYOUTS[layout].marks
    with pytest.raises(RequestError, match=message) as refused:
        compile_form(wrong, byte_vocabulary(marks), {m: 257 + i for i, m in enumerate(marks)})
    assert refused.value.param == "tools" and len(str(refused.value)) < 400


def test_a_pattern_may_have_slashes_and_lines(tmp_path):
    write_tokenizer(tmp_path, marks=LAYOUTS["qwen3_coder"].marks)
    grammars = Grammars(Tokenizer.load(tmp_path), V)
    for pattern in (r"^a\/b/c$", "a\n/"):
        text = {"type": "string", "pattern": pattern}
        tools = {"f": {"type": "object", "properties": {"a": text}}}
        assert grammars.constrain(form("qwen3_coder", tools=tools)).next_ids([], [EOS])


def test_what_is_no_form_of_calls_is_refused():
    assert trial.refusal(form("hermes")) is None
    for text in ("{}", "[]", "{", '{"layout":"hermes"}', form("hermes").text + " "):
        with pytest.raises(RequestError, match="tool_calls is not what a chat with tools makes"):
            CallForm.of(text)


def test_schemas_of_tools_have_a_limit_together():
    check_form("tool_calls", "x" * MAX_TOOL_BYTES)
    size = f"{MAX_TOOL_BYTES + 1} bytes is over the limit of {MAX_TOOL_BYTES}"
    with pytest.raises(RequestError, match=size) as error:
        check_form("tool_calls", "x" * (MAX_TOOL_BYTES + 1))
    assert error.value.param == "tools"


def test_twenty_tools_compile_in_time_and_once(tmp_path, monkeypatch):
    write_tokenizer(tmp_path, marks=LAYOUTS["hermes"].marks)
    grammars = Grammars(Tokenizer.load(tmp_path), V)
    schema = TOOLS["look_up"]
    many = form("hermes", tools={f"tool_{i}": schema for i in range(20)})
    grammars.constrain(form("hermes"))
    began = time.process_time()
    grammars.constrain(many)
    assert time.process_time() - began < 2  # 0.05 s alone on a core
    monkeypatch.setattr("tpdet.grammar.constraint.compile_form", None)
    assert grammars.constrain(many)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", kv_heads=2)


def questions():
    compact = {
        name: schema | {"x-guidance": {"whitespace_flexible": False}}
        for name, schema in TOOLS.items()
    }
    drawn = {"temperature": 1.0, "n": 2, "ignore_eos": False, "max_tokens": 150}
    return [
        ask(
            layout,
            range(20 + i),
            seed=i,
            tool_calls=form(layout, parallel=i > 0, tools=compact).text,
            **drawn,
        )
        for i, layout in enumerate(("hermes", "llama3_json"))
    ]


@pytest.fixture(scope="module")
def together(model):
    return run(model, questions(), look=False)


def test_a_random_model_that_has_to_call_calls_validly(model, together):
    tokenizer, ended = Tokenizer.load(model), 0
    for request in questions():
        parser = CallParser(request.request_id, tokenizer)

        def reader(parser=parser):
            return output_parser(tokenizer, [], None, parser, TOOLS)

        whole = RequestAssembler(request, tokenizer, reader)
        for output in together.outputs[request.request_id]:
            whole.push(output)
        for choice in whole.answer().choices:
            ended += choice.finish_reason == "stop"
            assert choice.calls or choice.finish_reason == "length", choice.text
            for call in choice.calls:
                jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
    assert ended > 1


@pytest.mark.slow
def test_two_ranks_call_with_the_same_bits(model, together):
    assert_same(run(model, questions(), tp=2, look=False), together, questions())


def test_a_familys_layout_depends_on_its_marks():
    assert layout_of("mistral", {"[ARGS]", "[CALL_ID]"}, "") == "mistral identified"
    assert layout_of("mistral", {"[ARGS]"}, "") == "mistral named"
    assert layout_of("mistral", set(), "") == "mistral"
    assert layout_of("glm", set(), r"</arg_key>\n<arg_value>") == "glm45"
    assert {layout_of(family.name, set(), "") for family in FAMILIES} <= LAYOUTS.keys()
    assert layout_of("glm", set(), "") == "glm47"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"oneOf": [{"type": "string"}, {"enum": ["a", "b"]}]}, "oneOf is not supported: its"),
        ({"type": "string", "not": {"const": "a"}}, "/not is not supported"),
        ({"type": "string", "anyOf": [{"type": "integer"}]}, "type beside anyOf or .ref has"),
        ({"$ref": "#/$defs/missing"}, "names nothing in it: declare it"),
        ({"$ref": "#/$defs/a"}, "nested more than 8 deep"),
        (5, "properties.a is 5: give a schema"),
    ],
)
def test_a_value_between_tags_is_followed_or_refused(value, message):
    """None of these may become any text."""
    schema = {"type": "object", "properties": {"a": value}}
    schema["$defs"] = {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}
    with pytest.raises(RequestError, match=message):
        compile_form(form("qwen3_coder", tools={"f": schema}), byte_vocabulary())


@pytest.mark.parametrize("layout", ["qwen3_coder", "pythonic"])
def test_a_reference_into_the_arguments_is_followed(layout):
    """As public servers have them: into a list, and not into definitions."""
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    again = {"type": "array", "items": {"$ref": "#/properties/first/anyOf/0"}, "minItems": 1}
    properties = {"first": {"anyOf": [point]}, "more": again, "no": False}
    schema = {"type": "object", "properties": properties, "required": ["more"]}
    start = compile_form(form(layout, tools={"f": schema}), byte_vocabulary())
    texts = [walk_bytes(start, seed, 900) for seed in range(10)]
    written = [text for text in texts if text is not None]
    assert len(written) > 3 and all(b'"x"' in text.partition(b"more")[2] for text in written)
    assert not any(b"no" in text.partition(b"more")[0] for text in written)
