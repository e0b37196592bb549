"""Bodies of `/v1/responses` and `/v1/messages` that are made to cost the server much."""

import json

import msgspec
import pytest

from tpdet.requests.body import limits
from tpdet.requests.body.messages_body import MessagesBody, MessagesChat
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.problems import ApiError
from tpdet.requests.body.responses_body import ResponsesBody, chat_of

MANY = 20_000
FUNCTION = {"type": "function", "name": "shell", "description": None}


def response(**fields):
    return chat_of(parse_body(ResponsesBody, {"input": "Hi"} | fields))


def message(*messages, **fields):
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}, *messages]}
    return MessagesChat(parse_body(MessagesBody, body | fields))


def test_what_an_answer_repeats_is_written_once_and_bounded():
    """Events hold it three times: no event loop encodes megabytes of a client's."""
    instructions = "é" * limits.MAX_REPEATED_CHARACTERS  # of the prompt, which has a bound
    found = response(metadata={"a": ["é", 1.5]}, tools=[FUNCTION], instructions=instructions)
    assert json.loads(found.form.echo["metadata"]) == {"a": ["é", 1.5]}
    assert json.loads(found.form.echo["instructions"]) == instructions
    (shown,) = json.loads(found.form.echo["tools"])
    assert shown == FUNCTION | {"parameters": None, "strict": None}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found.form), type=type(found.form))
    room = limits.MAX_REPEATED_CHARACTERS - len('{"a":""}')
    response(metadata={"a": "x" * room})
    over = {"a": "x" * (room + 1)}
    hidden = {"type": "namespace", "name": "n", "tools": [], "x": over}
    for name, value in (("metadata", over), ("tools", [hidden])):
        with pytest.raises(ApiError, match=rf"^{name} is 10\d+ characters") as refusal:
            response(**{name: value})
        assert (refusal.value.status, refusal.value.param) == (400, name)


def test_of_many_tools_that_are_left_out_a_few_are_named():
    """The log has a line of them, and the answer a header."""
    kinds = [f"other_{number}" for number in range(MANY)]
    ours = response(tools=[{"type": kind} for kind in kinds]).form
    theirs = message(tools=[{"type": "computer", "name": kind} for kind in kinds]).form
    for form in (ours, theirs):
        assert form.dropped == tuple(kinds[:16])
        assert form.headers == [(b"tpdet-dropped-tools", ", ".join(kinds[:16]).encode())]


def test_many_small_pieces_are_one_text():
    text = {"type": "text", "text": "ab"}
    thought = {"type": "thinking", "thinking": "cd"}
    chat = message({"role": "user", "content": [text] * MANY}).fields
    assert chat["messages"] == [
        {"role": "user", "content": [{**text, "text": "Hi"}] + [text] * MANY}
    ]
    said = {"role": "assistant", "content": [thought, text]}
    chat = message(*[said] * MANY).fields
    whole = {"content": "ab" * MANY, "reasoning_content": "cd" * MANY}
    assert chat["messages"][1:] == [{"role": "assistant"} | whole]
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "cd"}]},
        {"role": "assistant", "content": "ab"},
    ]
    assert response(input=items * MANY).fields["messages"] == [{"role": "assistant"} | whole]
