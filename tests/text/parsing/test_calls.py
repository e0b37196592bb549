"""Calls of tools: any cut of an answer says the same, and nothing is a call that was not made."""

import functools
import json
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.public_files import chat_templates
from tests.lib.server.harness import write_tokenizer
from tests.text.parsing.recorded_outputs import CutTokenizer
from tpdet.errors import UsageError
from tpdet.requests.request import SamplingParams, TokenOutput
from tpdet.text.outputs import ChoiceAssembler
from tpdet.text.parsing.argument_types import argument_json
from tpdet.text.parsing.calls import CallParser, family_of, output_parser
from tpdet.text.parsing.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    ContentText,
    FunctionCall,
    Message,
    ReasoningText,
)
from tpdet.text.parsing.family import FAMILIES, TOOL_PARSERS
from tpdet.text.parsing.reasoning import ReasoningParser
from tpdet.text.tokenizer import Tokenizer

SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "at": {"type": "object"},
    }
}
TOOLS = {"weather": SCHEMA, "time": {}}
ARGUMENTS = {"city": 'Zü"rich', "days": 3, "at": {"x": [1, None]}}
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MARKS = {
    "hermes": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "glm": (*GLM, "<think>", "</think>"),
    "llama3_json": ("<|python_tag|>",),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "harmony": HARMONY,
    "granite": ("<|tool_call|>",),
    "phi4_mini": ("<|tool_call|>", "<|/tool_call|>"),
    "olmo3": (),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
}
"""The added tokens of a tokenizer of each family."""


def written(family, name, arguments) -> str:
    """A call as the family's models write it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    texts = [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in arguments.items()
    ]
    python = f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
    tags = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts)
    values = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in texts)
    return {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "qwen3_coder": f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>",
        "glm": f"<tool_call>{name}\n{values}</tool_call>",
        "llama3_json": f"<|python_tag|>{call}",
        "pythonic": f"<|python_start|>[{python}]<|python_end|>",
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}",
        "harmony": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>",
        "granite": f"<|tool_call|>[{call}]",
        "phi4_mini": f"<|tool_call|>[{call}]<|/tool_call|>",
        "olmo3": f"<function_calls>\n{python}\n</function_calls>",
        "seed_oss": f"<seed:tool_call>\n<function={name}>\n"
        f"{tags.replace(chr(10), '')}</function>\n</seed:tool_call>",
    }[family]


def tokenizer_of(family, text, cuts) -> CutTokenizer:
    """The text as tokens: marks, and others that end at the cuts."""
    return CutTokenizer.cut({m: i for i, m in enumerate(MARKS[family], 5)}, text, cuts)


def parser_of(family, tokenizer, tools=TOOLS):
    prompt = "<|start|>assistant" if family == "harmony" else ""
    reasoning = ReasoningParser.of("auto", tokenizer)
    calls = CallParser(family, tokenizer)
    return output_parser(tokenizer, tokenizer.prompt(prompt), reasoning, calls, tools)


def read(family, text, cuts=(), groups=None, hides=False, cut=False, **how) -> Message:
    """What an answer says; groups: how many tokens come together; hides: special ones.

    cut: the answer did not end by itself.
    """
    tokenizer = tokenizer_of(family, text, cuts)
    parser, events, ids = parser_of(family, tokenizer, **how), [], tokenizer.ids
    for size in groups or [len(ids)]:
        texts = tokenizer.texts(ids[:size])
        if hides:
            texts = ["" if t.startswith("<|") and t in MARKS[family] else t for t in texts]
        events += parser.feed(ids[:size], texts)
        ids = ids[size:]
    assert not ids
    return Message.of(events + parser.finish(cut))


@pytest.mark.parametrize("family", MARKS)
def test_each_family_reads_what_its_models_write(family):
    text = "".join(written(family, name, ARGUMENTS) for name in ("weather", "time"))
    message = read(family, text, range(len(text)))
    assert [call.name for call in message.calls] == ["weather", "time"]
    assert [json.loads(call.arguments) for call in message.calls] == [ARGUMENTS] * 2
    assert (message.content, message.reasoning) == ("", "")
    assert read(family, written(family, "weather", {})).calls == (FunctionCall("weather", "{}"),)


def test_every_family_is_tested():
    assert {*MARKS} == {family.name for family in FAMILIES}


PIECES = ("a", " b", "\n", "é", "<", "{", "}", '"', "</", "[", "functools", ";", "<function=", "(")


@st.composite
def answers(draw):
    """A family, an answer that has calls, parts of calls and texts in it, and its cuts."""
    family = draw(st.sampled_from([*MARKS]))
    whole = [written(family, name, ARGUMENTS) for name in ("weather", "time", "unknown")]
    part = st.sampled_from(whole).flatmap(
        lambda text: st.integers(0, len(text)).map(lambda end: text[:end])
    )
    parts = st.one_of(
        st.sampled_from(whole), part, st.sampled_from(PIECES), st.sampled_from(["", *MARKS[family]])
    )
    text = "".join(draw(st.lists(parts, min_size=1, max_size=5)))
    cuts = draw(st.sets(st.integers(0, len(text)), max_size=60))
    return family, text, sorted(cuts)


@settings(max_examples=250, deadline=None)
@given(answers(), st.lists(st.integers(1, 9), max_size=40))
def test_any_split_of_an_answer_says_the_same(answer, sizes):
    family, text, cuts = answer
    whole = read(family, text, cuts)
    count, groups = len(tokenizer_of(family, text, cuts).ids), []
    while count > 0:
        groups.append(min(sizes.pop() if sizes else 1, count))
        count -= groups[-1]
    assert read(family, text, cuts, groups) == whole
    assert read(family, text, range(len(text))) == whole  # nor do tokens' borders count
    assert all(call.name in TOOLS for call in whole.calls)
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls)
    assert read(family, text, cuts, hides=True).calls == whole.calls
    assert not read(family, text, cuts, tools=None).calls


@settings(max_examples=150, deadline=None)
@given(answers())
def test_tokens_that_pass_say_what_those_say_that_are_pushed(answer):
    family, text, cuts = answer
    tokenizer = tokenizer_of(family, text, cuts)
    parser, events, ids = parser_of(family, tokenizer), [], tokenizer.ids
    for token, piece in zip(ids, tokenizer.texts(ids), strict=True):
        if parser.passes(token, piece):
            events.append(ContentText(piece))
            continue
        parser.push(token, piece)
        events += _told(parser.take(piece))
    assert Message.of(events + _told(parser.take("", last=True))) == read(family, text, cuts)


def _told(taken):
    content, reasoning, events = taken
    return [*events] or [ContentText(content), ReasoningText(reasoning)]


def test_tokens_pass_until_a_mark_and_behind_a_call():
    tokenizer = tokenizer_of("hermes", "<think>a</think>bc", range(20))
    parser = parser_of("hermes", tokenizer)
    passed = []
    for token, piece in zip(tokenizer.ids, tokenizer.texts(tokenizer.ids), strict=True):
        passed.append(parser.passes(token, piece))
        if not passed[-1]:
            parser.push(token, piece)
            parser.take(piece)
    assert passed == [False, False, False, True, True] and parser.reasoning_tokens == 1


@functools.cache
def real_tokenizer(family) -> Tokenizer:
    """One of bytes, with the family's marks."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), marks=MARKS[family])
        return Tokenizer.load(folder)


@settings(max_examples=100, deadline=None)
@given(answers(), st.text("ab<{", max_size=3), st.booleans())
def test_a_stop_string_cuts_the_text_alone(answer, stop, include):
    family, text = answer[0], answer[1] or "a"
    tokenizer = real_tokenizer(family)
    ids = tokenizer.encode(text, add_special_tokens=False)
    how = {"stop": (stop,) if stop else (), "include_stop_str_in_output": include}
    params = SamplingParams(skip_special_tokens=False, **how)
    calls = CallParser(family, tokenizer)
    reasoning = ReasoningParser.of("auto", tokenizer)
    parser = output_parser(tokenizer, [1], reasoning, calls, TOOLS)
    assembler = ChoiceAssembler(tokenizer, params, parser)
    events = []
    for position, id_ in enumerate(ids, 1):
        reason = "length" if position == len(ids) else None
        delta = assembler.push(TokenOutput("r", 0, id_, -1.0, (), reason, None))
        events += delta.events or [ContentText(delta.text), ReasoningText(delta.reasoning)]
        if delta.finish_reason:
            break
    answer, streamed = assembler.answer(0), Message.of(events)
    assert (streamed.content, streamed.reasoning) == (answer.text, answer.reasoning)
    assert streamed.calls == answer.calls
    whole = read(family, text, cut=True)
    if stop not in text or not stop:
        assert streamed == whole
    assert answer.calls == whole.calls[: len(answer.calls)] or not whole.calls


@pytest.mark.parametrize(
    "family", [f for f in MARKS if f not in ("olmo3", "llama3_json", "qwen3_coder")]
)
def test_letters_of_a_token_are_text(family):
    """Negative control: with the ids of the marks it is a call, spelled it is none."""
    text = written(family, "weather", ARGUMENTS)
    assert read(family, text).calls
    tokenizer = tokenizer_of(family, text, ())
    spelled = tokenizer.spelled(text)
    parser = parser_of(family, tokenizer)
    events = parser.feed(spelled, tokenizer.texts(spelled)) + parser.finish()
    assert Message.of(events) == Message(content=text)


_CALL = (FunctionCall("time", "{}"),)
_TIMED, _TIMED_B, _A_TIMED = (Message("", text, _CALL) for text in ("", "b", "a"))


@pytest.mark.parametrize(
    ("family", "text", "message"),
    [
        ("hermes", '<tool_call>{"name": "weather"', Message()),
        ("hermes", 'so<tool_call>{"name": "weather", "arguments": {', Message(content="so")),
        ("hermes", "<tool_call>none</tool_call>b", Message(content="<tool_call>none</tool_call>b")),
        ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": 1, "a": 2}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "time", "name": "rm", "arguments": {}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "time", "arguments": {}}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "time", "arguments": {},}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "time"}</tool_call>', None),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None),
        ("hermes", '<tool_call>["time"]</tool_call>', None),
        ("hermes", "</tool_call>", None),
        (
            "hermes",
            '<think>a<tool_call>{"name": "time", "arguments": {}}</tool_call></think>b',
            Message('a<tool_call>{"name": "time", "arguments": {}}</tool_call>', "b"),
        ),
        (
            "qwen3_coder",
            "<think>a<tool_call><function=time></function></tool_call></think>b",
            Message("a<tool_call><function=time></function></tool_call>", "b"),
        ),
        ("qwen3_coder", "<tool_call><function=rm></function></tool_call>", None),
        ("qwen3_coder", "<tool_call><function=time>x</function></tool_call>", None),
        ("qwen3_coder", "say <function=time></function></tool_call>", None),
        ("qwen3_coder", "<tool_call><function=time>\n<parameter=a>rm", Message()),
        ("glm", "<tool_call>rm</tool_call>", None),
        ("glm", "<tool_call>time<arg_key>a</arg_key><arg_value>b", Message()),
        ("glm", "<tool_call>time<arg_key>a</arg_key></tool_call>", None),
        ("llama3_json", '{"name": "time", "parameters": {}} is how', None),
        ("llama3_json", '{"name": "time", "parameters": {', None),
        ("llama3_json", 'see {"name": "time", "parameters": {}}', None),
        ("llama3_json", '<|python_tag|>{"name": "time"', Message()),
        ("pythonic", "[time()] is how", None),
        ("pythonic", "[time(), rm()]", None),
        ("pythonic", "[time(1)]", None),
        ("pythonic", "[time(a=open('x'))]", None),
        ("pythonic", "[time(a=1, a=2)]", None),
        ("pythonic", "[time(**{'a': 1})]", None),
        ("pythonic", "[1, 2]", None),
        ("pythonic", "[time(a='", None),
        ("mistral", "[TOOL_CALLS]rm[ARGS]{}", None),
        ("mistral", "[TOOL_CALLS]time[ARGS]{", Message()),
        ("mistral", "[TOOL_CALLS][ARGS]{}", None),
        ("mistral", "[TOOL_CALLS]time[ARGS]no", None),
        ("granite", "<|tool_call|>no", None),
        ("phi4_mini", "functools are tools", None),
        ("phi4_mini", '<|tool_call|>[{"name": "time"', Message()),
        ("olmo3", "<function_calls>\nrm()\n</function_calls>", None),
        ("olmo3", "<function_calls>\ntime(", Message()),
        ("seed_oss", "<seed:tool_call><function=rm></function></seed:tool_call>", None),
        (
            "harmony",
            "<|channel|>commentary to=functions.time<|message|>{<|call|>",
            Message(content="{"),
        ),
        ("harmony", "<|channel|>commentary to=functions.time<|message|>{", Message()),
        ("harmony", "<|channel|>commentary to=python<|message|>1<|call|>", Message()),
        ("harmony", " to=functions.time<|channel|>commentary<|message|>{", Message()),
        ("harmony", " to=nobody knows", Message(content=" to=nobody knows")),
        ("harmony", "to", Message(content="to")),
        ("llama3_json", '<|python_tag|>{"name": "time", "parameters": {}} \n', _TIMED),
        ("granite", '<|tool_call|>{"name": "time", "arguments": {}} \nb', _TIMED_B),
        ("hermes", 'a \n<tool_call>{"name": "time", "arguments": {}}</tool_call>\n', _A_TIMED),
        (
            "harmony",
            "<|channel|>analysis<|message|>to=functions.time{}<|end|>",
            Message("to=functions.time{}"),
        ),
    ],
)
def test_what_is_no_call_is_text_or_an_end(family, text, message):
    assert read(family, text) == (Message(content=text) if message is None else message)


def test_a_call_has_the_id_that_the_model_wrote():
    text = '[TOOL_CALLS]time[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}'
    tokenizer = tokenizer_of("mistral", text, ())
    parser = parser_of("mistral", tokenizer)
    assert parser.feed(tokenizer.ids, tokenizer.texts(tokenizer.ids)) == [
        CallBegun(0, "time", "a1b2c3d4e"),
        CallArguments(0, '{"a": 1}'),
        CallEnded(0),
    ]


def test_arguments_are_as_the_model_wrote_them_or_have_the_types_of_the_schema():
    call = '{"name": "time", "arguments": {"b":1.50,  "a": "\\ud800"}}'
    (made,) = read("hermes", f"<tool_call>{call}</tool_call>").calls
    assert made.arguments == '{"b":1.50,  "a": "\\ud800"}'
    values = ("5", "null", "True", '{"a": 1}', "1e400", "[1,", "", "x\ny", "0" * 9, "-0.5")
    tags = "".join(f"\n<parameter=p{i}>{value}</parameter>" for i, value in enumerate(values))
    text = f"<tool_call><function=f>{tags}</function></tool_call>"
    for types, expected in (
        ({}, '[5, null, true, {"a": 1}, 1e400, "[1,", "", "x\\ny", "000000000", -0.5]'),
        ({"type": "string"}, json.dumps([*values])),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, None),
    ):
        schema = {
            "$defs": {"n": {"type": ["integer", "null"]}},
            "properties": {f"p{i}": types for i in range(len(values))},
        }
        (made,) = read("qwen3_coder", text, tools={"f": schema}).calls
        if expected is None:
            expected = json.dumps([5, None, *values[2:]])
        found = made.arguments
        assert [*json.loads(found, parse_float=str).values()] == json.loads(
            expected, parse_float=str
        )


def test_a_schema_that_refers_to_itself_is_read_in_linear_time():
    class Counted(dict):
        read = 0

        def get(self, *key):
            Counted.read += 1
            return super().get(*key)

    def types(*branches):
        return Counted(anyOf=[Counted({"$ref": "#/$defs/a~1b"}) for _ in range(8)] + [*branches])

    text, number = Counted(type="string"), Counted(type="integer")
    for branches, expected in (([text], '"5"'), ([text, number], "5"), ([], "5")):
        of_value = Counted({"$ref": "#/$defs/a~1b"}) if not branches else Counted(anyOf=branches)
        for schema in (of_value, types()):
            root = Counted({"$defs": Counted({"a/b": types() if not branches else of_value})})
            assert argument_json("5", schema, root) == expected
    assert Counted.read < 10_000


def test_hidden_tokens_are_in_the_arguments_and_the_end_is_not():
    """Special tokens have no text where they are skipped; a call's string has them."""
    text = '{"name": "weather", "parameters": {"city": "a<|python_tag|>b"}}'
    tokenizer = tokenizer_of("llama3_json", text + "<|python_tag|>", ())
    parser = parser_of("llama3_json", tokenizer)
    shown = ["" if id_ == 5 else tokenizer.token_text(id_) for id_ in tokenizer.ids]
    *events, end = zip(tokenizer.ids, shown, strict=True)
    for token in events:
        parser.push(*token)
    parser.push(*end, last=True)
    _, _, made = parser.take("".join(shown), last=True)
    assert Message.of(made).calls == (FunctionCall("weather", '{"city": "a<|python_tag|>b"}'),)


HOSTILE = (
    "<tool_call>", "<tool_call>{", '<tool_call>{"', "</tool_call>", '{"name": "', "[time(a=[", "[",
    "<function=a>", "</function></tool_call>", "<tool_call><function=time><parameter=a>", "\n ",
    "[TOOL_CALLS]a[ARGS]", "[TOOL_CALLS][", "<|channel|>a to=functions.time<|message|>{", ";{}",
    "<function_calls>(", "<arg_value></tool_call> ", "<tool_call>time<arg_key>a</arg_key>", '"\\',
    "<tool_call>\n<function=time>\n<parameter=a>\nx\n</parameter> </parameter>", "functools[",
    "<|tool_call|>[{}],", "<seed:tool_call> ", "<think><tool_call>", "<", "to=", "((((", "[a." * 3,
)  # fmt: skip


def seconds_of(family, text, size) -> float:
    """The processor's time for an output of so many characters."""
    whole = text * (size // len(text))
    tokenizer = tokenizer_of(family, whole, range(0, len(whole), 5))
    parser, texts = parser_of(family, tokenizer), tokenizer.texts(tokenizer.ids)
    begin = time.process_time()
    parser.feed(tokenizer.ids, texts)
    parser.finish(cut=True)
    return time.process_time() - begin


@pytest.mark.slow
@pytest.mark.parametrize("family", MARKS)
def test_hostile_output_takes_linear_time(family):
    """8 times as much, up to 1 MB, takes some 8 times as long, on the processor's own clock."""
    slow = {}
    for text in HOSTILE:
        less, more = (seconds_of(family, text, size) for size in (1 << 17, 1 << 20))
        print(family, repr(text), f"{more:.2f} s")
        if more > 20 * less + 0.1:
            slow[text] = less, more
    assert not slow


@pytest.mark.parametrize(
    ("prompt", "text", "message"),
    [
        ("a", "<think>r</think>c", Message("r", "c")),
        ("a<think>\n", "r</think>c", Message("r", "c")),
        ("a<think></think>", "<think>c", Message("", "<think>c")),
        ("a", "c<think>r</think>", Message("", "c<think>r</think>")),
        ("a", "\n<think>r</thin", Message("r</thin", "\n")),
        ("a<think>", "r</think>\n<function_calls>\ntime()\n</function_calls>", None),
    ],
)
def test_tags_that_are_no_tokens_divide_an_answer(prompt, text, message):
    message = Message("r", "", _CALL) if message is None else message
    for cuts in ((), range(len(text)), range(0, len(text), 3)):
        tokenizer = tokenizer_of("olmo3", text, cuts)
        reasoning = ReasoningParser.of("text_think", tokenizer)
        calls, begin = CallParser("olmo3", tokenizer), tokenizer.prompt(prompt)
        parser = output_parser(tokenizer, begin, reasoning, calls, TOOLS)
        events = parser.feed(tokenizer.ids, tokenizer.texts(tokenizer.ids)) + parser.finish()
        assert Message.of(events) == message


@pytest.mark.slow
def test_auto_knows_published_templates():
    families = {name: family_of(source) for name, source in chat_templates().items()}
    if not families:
        pytest.skip("no network")
    found = {name: family and family.name for name, family in families.items()}
    for name, family in (
        ("trl qwen3", "hermes"),
        ("trl qwen2_5", "hermes"),
        ("trl qwen3_8", "qwen3_coder"),
        ("trl glm4moe", "glm"),
        ("trl gptoss", "harmony"),
        ("trl llama3_2", "llama3_json"),
        ("axolotl llama4", "pythonic"),
        ("axolotl mistral_v3_tekken", "mistral"),
        ("trl gemma4", None),
        ("trl deepseekv3", None),
        ("trl phi3", None),
        ("axolotl chatml", None),
    ):
        assert found[name] == family, name


def test_names_and_templates_lead_to_families():
    assert TOOL_PARSERS["qwen3_xml"] is TOOL_PARSERS["qwen3_coder"]
    assert TOOL_PARSERS["granite4"] is TOOL_PARSERS["hermes"] is not TOOL_PARSERS["granite"]
    assert family_of("<tool_call>\n<function=example>").name == "qwen3_coder"
    assert family_of("{{ '<tool_call>' }}").name == "hermes"
    assert family_of("<|channel|>").name == "harmony" and family_of("plain") is None
    tokenizer = tokenizer_of("hermes", "a", ())
    assert CallParser.of("off", tokenizer) is CallParser.of("auto", None) is None
    with pytest.raises(UsageError, match=r"--tool-call-parser kimi: use off, auto, .*qwen3_xml"):
        CallParser.of("kimi", tokenizer)
    with pytest.raises(UsageError, match="leave --skip-tokenizer-init out"):
        CallParser.of("hermes", None)
    with pytest.raises(UsageError, match=r"--tool-call-parser harmony: .* no added tokens"):
        CallParser.of("openai", tokenizer)
