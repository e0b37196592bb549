"""Items of the Responses API as messages, and system messages where a chat template takes them."""

import pytest

from tpdet.errors import RequestError
from tpdet.requests.body.prompts import with_system_first
from tpdet.requests.body.responses_items import Items, sealed
from tpdet.text.chat_template import ChatTemplate

ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LEFT_OUT = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


def said(role, text):
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def thought(text, **fields):
    parts = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts} | fields


def call(name, **fields):
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} | fields


def called(name, arguments="{}", id=None):
    function = {"name": name, "arguments": arguments}
    return {"id": id or name, "type": "function", "function": function}


def result(name):
    return {"type": "function_call_output", "call_id": name, "output": "x"}


def test_what_is_said_in_one_turn_is_one_message():
    items = [
        said("developer", "d"),
        said("user", "u"),
        thought("a"),
        said("assistant", "b"),
        call("f"),
        call("g", namespace="n"),
        result("f"),
        result("g"),
        thought("", summary=[{"type": "summary_text", "text": t} for t in ("one", "two")]),
        {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": 'é"'},
        {
            "type": "custom_tool_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "y"}],
        },
        thought("", encrypted_content=sealed("ü")),
        said("assistant", "one"),
        said("assistant", "two"),
        said("user", "end"),
        thought("cut off", encrypted_content=sealed("not read")),
    ]
    reader = Items()
    assert reader.messages("i", items) == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "reasoning_content": "a",
            "content": "b",
            "tool_calls": [called("f"), called("n__g", id="g")],
        },
        {"role": "tool", "tool_call_id": "f", "content": "x"},
        {"role": "tool", "tool_call_id": "g", "content": "x"},
        {
            "role": "assistant",
            "reasoning_content": "one\n\ntwo",
            "tool_calls": [called("p", '{"input": "é\\""}', id="c")],
        },
        {"role": "tool", "tool_call_id": "c", "content": "y"},
        {"role": "assistant", "reasoning_content": "ü", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "end"},
        {"role": "assistant", "reasoning_content": "cut off", "content": ""},
    ]
    assert reader.places[0] == "instructions" and reader.places[3] == "input[2]"


MIDDLE = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "system", "content": [{"type": "text", "text": t} for t in ("c", "d")]},
]
LEADING = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, MIDDLE[1]]


@pytest.mark.parametrize("source", [FIRST, LEFT_OUT])
def test_system_messages_are_one_where_the_template_wants_it(source):
    template = ChatTemplate(source, {}, [])
    moved = with_system_first(MIDDLE, template, has_tools=False)
    assert moved == [{"role": "system", "content": "a\n\nc\nd"}, MIDDLE[1]]
    assert with_system_first(LEADING, template, False)[0]["content"] == "a\n\nb"
    assert with_system_first(MIDDLE[:2], template, False) == MIDDLE[:2]
    unanswered = [{"role": "assistant", "tool_calls": [called("f")]}, *MIDDLE[1:]]
    with pytest.raises(RequestError, match=r"messages\[0\]: the tool call 'f' has no result"):
        with_system_first(unanswered, template, has_tools=True)


def test_system_messages_stay_where_the_template_shows_them():
    template = ChatTemplate(ANY, {}, [])
    for messages in (MIDDLE, LEADING):
        assert with_system_first(messages, template, has_tools=False) is messages
