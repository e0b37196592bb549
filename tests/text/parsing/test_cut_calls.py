"""A call in which `max_tokens` cut the answer is told as one that has not ended, never as text."""

import json
import re

import pytest
from canitoolcall.chunking import DEFAULT_STRATEGIES, split
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.parsing.test_calls import (
    ARGUMENTS,
    MARKS,
    TOOLS,
    answers,
    read,
    tokenizer_of,
    written,
)
from tests.text.parsing.test_canitoolcall import FIXTURES, READ_BY, reader_of
from tpdet.text.parsing.events import Message

UNMARKED = {
    "llama3_json": ("llama3_json", json.dumps({"name": "weather", "parameters": ARGUMENTS})),
    "pythonic": ("pythonic", f"[weather({', '.join(f'{k}={v!r}' for k, v in ARGUMENTS.items())})]"),
    "qwen3_coder": (
        "qwen3_coder",
        written("qwen3_coder", "weather", ARGUMENTS).removeprefix("<tool_call>\n"),
    ),
    "mistral, a list": (
        "mistral",
        f"[TOOL_CALLS]{json.dumps([{'name': 'weather', 'arguments': ARGUMENTS}])}",
    ),
}
"""Calls that begin without a mark that is a token, and other forms of a family."""
WRITTEN = {family: (family, written(family, "weather", ARGUMENTS)) for family in MARKS} | UNMARKED
IN_LETTERS = ("hermes", "qwen3_coder", "glm", "granite", "seed_oss")
"""Families whose marks may all be letters, in tokenizers that do not have them as tokens."""


def ends(family, text):
    """Where a text may be cut: not in a mark that is a token."""
    marks = "|".join(map(re.escape, MARKS[family])) or "(?!)"
    inside = {i for m in re.finditer(marks, text) for i in range(m.start() + 1, m.end())}
    return [end for end in range(1, len(text) + 1) if end not in inside]


@pytest.mark.parametrize("name", [*WRITTEN, *(f"{family}, letters" for family in IN_LETTERS)])
def test_a_call_is_told_from_its_name_on_and_only_grows(name, monkeypatch):
    family, text = WRITTEN[name.removesuffix(", letters")]
    if name.endswith(", letters"):
        monkeypatch.setitem(MARKS, family, ())
    (whole,) = read(family, text).calls
    told, lengths, as_text = [], set(), []
    for end in ends(family, text):
        message = read(family, text[:end], cut=True)
        assert message.reasoning == ""
        if message.content:
            assert not told and text.startswith(message.content)
            as_text.append(message.content)
        if not message.calls:
            assert not told, text[:end]
            continue
        (call,) = message.calls
        assert call.name == "weather" and whole.arguments.startswith(call.arguments)
        assert not told or len(call.arguments) >= len(told[-1].arguments)
        assert call.ended or not told or not told[-1].ended
        told.append(call)
        lengths.add(len(call.arguments))
    assert told[-1] == whole and not told[0].ended and len(lengths) > 3
    longest = max(map(len, as_text), default=0)
    # Letters are text until they are a mark, or until they name a tool.
    assert longest <= (text.index("weather") + len("weather") + 2 if name in UNMARKED else 17)


@pytest.mark.parametrize("family", MARKS)
def test_two_calls_are_a_whole_one_and_one_that_has_not_ended(family):
    first, second = (written(family, name, ARGUMENTS) for name in ("time", "weather"))
    found = {}
    for end in ends(family, second)[:-1]:
        message = read(family, first + second[:end], cut=True)
        assert message.calls[0] == read(family, first).calls[0], second[:end]
        assert message.content == "" or second.startswith(message.content)
        found[len(message.calls)] = message.calls[-1]
    assert found[2].name == "weather" and set(found) == {1, 2}


@settings(max_examples=250, deadline=None)
@given(answers(), st.lists(st.integers(1, 9), max_size=40))
def test_any_split_of_a_cut_answer_says_the_same(answer, sizes):
    family, text, cuts = answer
    whole = read(family, text, cuts, cut=True)
    count, groups = len(tokenizer_of(family, text, cuts).ids), []
    while count > 0:
        groups.append(min(sizes.pop() if sizes else 1, count))
        count -= groups[-1]
    assert read(family, text, cuts, groups, cut=True) == whole
    assert read(family, text, range(len(text)), cut=True) == whole
    assert all(call.name in TOOLS for call in whole.calls)
    assert all(call.ended for call in whole.calls[:-1])
    ended = read(family, text, cuts)
    assert whole.calls[: len(ended.calls)] == ended.calls  # what was a call still is
    assert not read(family, text, cuts, tools=None, cut=True).calls
    assert read(family, text, cuts, hides=True, cut=True).calls == whole.calls


@pytest.mark.parametrize(
    ("family", "text", "content"),
    [
        ("hermes", '<tool_call>{"name": "rm", "arguments": {', ""),
        ("hermes", '<tool_call>{"name": "time", "arguments": [1', ""),
        ("hermes", '<tool_call>{"name": "time", "arguments": {"a": NaN', ""),
        ("hermes", '<tool_call>{"name": "tim', ""),
        ("llama3_json", '{"name": "rm", "parameters": {', None),
        ("llama3_json", '{"name": "John", "age', None),
        ("llama3_json", '{"name": "tim', None),
        ("pythonic", "[1, 2", None),
        ("pythonic", "[ti", None),
        ("harmony", "<|channel|>commentary to=python<|message|>1", ""),
        ("harmony", " to=functions.ti", ""),
        ("harmony", "<|channel|>commentary to=functions.time<|message|>no", ""),
        ("glm", "<tool_call>time", ""),  # it may go on: timer
    ],
)
def test_what_names_no_tool_is_told_as_before(family, text, content):
    assert read(family, text, cut=True) == Message(content=text if content is None else content)


def test_a_call_of_the_model_itself_that_is_not_whole_is_none():
    """Negative control: only a cut tells it, not the model's own end, nor a stop string."""
    for family in MARKS:
        text = written(family, "weather", ARGUMENTS)
        for end in ends(family, text):
            assert all(call.ended for call in read(family, text[:end]).calls)


@pytest.mark.parametrize("family", READ_BY)
def test_recorded_outputs_that_are_cut_say_the_same_in_any_split(family, record_property):
    told = 0
    for fixture in FIXTURES:
        if fixture.family != family:
            continue
        tokenizer, marks, parser = reader_of(fixture)
        whole = Message.of(_events(parser(), tokenizer, [tokenizer.ids], cut=False))
        names = {tool["function"]["name"] for tool in fixture.tools}
        count = len(tokenizer.ids)
        for end in sorted({count * part // 12 for part in range(1, 12)} - {0}):
            ids = tokenizer.ids[:end]
            one = _events(parser(), tokenizer, [ids], cut=True)
            message = Message.of(one)
            for strategy in DEFAULT_STRATEGIES:
                groups = split(ids, strategy, special=marks.values())
                assert Message.of(_events(parser(), tokenizer, groups, cut=True)) == message
            assert {call.name for call in message.calls} <= names
            for cut, call in zip(message.calls, whole.calls, strict=False):
                assert call.name == cut.name and call.arguments.startswith(cut.arguments)
            told += any(not call.ended for call in message.calls)
    record_property("told", told)
    assert told > 0


def _events(parser, tokenizer, groups, cut):
    events = [event for ids in groups for event in parser.feed(ids, tokenizer.texts(ids))]
    return events + parser.finish(cut)
