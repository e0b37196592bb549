"""The arguments of a call that was cut anywhere: a stream adds up to the whole answer."""

import json

import jiter
import pytest
from anthropic.lib.streaming._messages import accumulate_event

from tpdet.requests.answer.calls import parts_of
from tpdet.requests.answer.choices import ChoiceWriter, envelope
from tpdet.requests.answer.json_pieces import json_pieces
from tpdet.requests.answer.whole_answer import FORM_WRITERS
from tpdet.requests.body.messages_body import MessagesForm
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.responses_body import ResponsesForm
from tpdet.requests.request import Request, SamplingParams
from tpdet.requests.shown_ids import ShownIds
from tpdet.text.outputs import ChoiceAnswer, TextDelta
from tpdet.text.parsing.events import FunctionCall
from tpdet.tools.tape import messages
from tpdet.tools.tape.answers import shown_answer
from tpdet.tools.tape.tape_file import Turn

IDS = ShownIds("0" * 64)
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
ARGUMENTS = (
    "{}",
    "{ }",
    r'{"input": "a\"b\\\n\u00e9\/ é日🙂", "c": ""}',
    r'{"input": "\ud83d\ude00 \\ud83d \\\ud83d\ude00", "\ud83d\ude00": "\ud83d\ude00"}',
    '{"a": 12, "b": -1.5e3, "c": -0, "d": 123456789012345678901234567890, "e": 0.10, "f": 1e400}',
    '{"a": {"b": {"c": [true, false, null]}, "d": {}}, "input": "]}{[,:", "e": null}',
    '{"a": [[], [1, [2, "x"]], [{"k": [ ] } ]], "a" : "twice" }',
    '{\n  "input" :\t"*** Begin",\r\n "b":[ 1 , 2 ]\n}',
)
"""Also of what a strict reader refuses: a name that stands twice."""


def call_of(kind: str, custom: bool = False) -> Call:
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams())
    forms = {
        "chat": None,
        "messages": MessagesForm(),
        "responses": ResponsesForm(echo={}, names={"f": ("custom", "f", "")} if custom else {}),
    }
    plain = dict.fromkeys(("logprobs", "prompt_logprobs"))
    plain |= dict.fromkeys(
        ("include_usage", "continuous_usage", "echo", "token_names", "token_ids"), False
    )
    plain |= {"kind": "chat", "group_id": "chatcmpl-g", "created": 1, "model": "m"}
    return Call(requests=(request,), stream=True, echoes=(), form=forms[kind], **plain)


def streamed_and_whole(call, said):
    """The events of a stream whose answer is one call of a tool, and the whole answer."""
    around = envelope(call, 7, "fp", stream=True)
    delta = TextDelta(events=said.events(0), finish_reason="length")
    writer = None if call.form is None else FORM_WRITERS[call.form.api](call)
    if writer is not None:
        events = [*writer.begin(IDS, around), *writer.add(delta), *writer.end(around, USAGE)]
        return json_of(events), json_of(writer.whole)
    whole, stream = (ChoiceWriter(call, None, 0, ids=IDS) for _ in range(2))
    events = [stream.event(around, stream.piece(part, None), False) for part in parts_of(delta)]
    choice = whole.whole(ChoiceAnswer(0, "", (), (), "length", None, calls=(said,)), None)
    return json_of(events), json_of({"choices": [choice]})


def json_of(value):
    return json.loads("".join(json_pieces(value)))


def on_tape(events):
    """The answer that `tpdet tape` makes of a stream."""
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    turn = Turn(turn=1, method="POST", path="/", request="", event_stream=True, answer=stream)
    return shown_answer(turn)


def cut(arguments):
    """A call cut at every place of its arguments, and the whole one."""
    for end in range(len(arguments) + 1):
        yield FunctionCall("f", arguments[:end], ended=False)
    yield FunctionCall("f", arguments)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_a_message_is_what_its_stream_adds_up_to(arguments, monkeypatch):
    call, differing = call_of("messages"), 0
    for said in cut(arguments):
        events, whole = streamed_and_whole(call, said)
        assert on_tape(events) == whole
        (block,) = whole["content"]
        client, buffers = None, {}
        for event in events:
            if event["type"] != "ping":
                client = accumulate_event(event=event, current_snapshot=client, json_bufs=buffers)
        assert repr(client.content[0].input) == repr(block["input"]), said
        # The control: pieces that are read as whole JSON are nothing where they were cut.
        with monkeypatch.context() as patch:
            patch.setattr(messages, "closed_object", str)
            differing += on_tape(events) != whole
    assert block["input"] == json.loads(arguments)
    assert (differing > 5) == (len(arguments) > 5)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_a_chat_and_a_response_say_arguments_as_far_as_they_came(arguments):
    chat, response = call_of("chat"), call_of("responses")
    for said in cut(arguments):
        events, whole = streamed_and_whole(chat, said)
        (choice,), (shown,) = whole["choices"], on_tape(events)["choices"]
        assert shown["message"]["tool_calls"] == choice["message"]["tool_calls"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == said.arguments
        events, whole = streamed_and_whole(response, said)
        assert item_of(events)["arguments"] == said.arguments == whole["output"][0]["arguments"]
        assert on_tape(events) == whole


def item_of(events):
    """The one item of a response that was left before the item ended: of its deltas alone."""
    left = [event for event in events if event["type"].endswith((".created", ".added", ".delta"))]
    (item,) = on_tape(left)["output"]
    return item


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_the_text_of_a_custom_tool_comes_as_far_as_it_is_text(arguments):
    call, inputs = call_of("responses", custom=True), set()
    whole_input = json.loads(arguments).get("input")
    for said in cut(arguments):
        events, whole = streamed_and_whole(call, said)
        (item,) = whole["output"]
        assert item_of(events)["input"] == item["input"] and on_tape(events) == whole
        if said.ended and whole_input is None:
            assert item["input"] == arguments
            continue
        assert (whole_input or "").startswith(item["input"]), said
        if said.arguments:
            oracle = jiter.from_json(said.arguments.encode(), partial_mode="trailing-strings")
            assert item["input"] == oracle.get("input", "")
        inputs.add(item["input"])
    assert len(inputs) == 1 + len(whole_input or "")


@pytest.mark.parametrize(
    "arguments",
    [
        r'{"input": "a \ud83d b", "c": ["\ude00", 1',
        r'{"input": "\ud83d\ud83d\ude00',
        r'{"input": "\ud83d',
        '{"a": ' + "[" * 300 + "1" + "]" * 300,
        '{"a": ' + "[" * 300 + "1",
        '{"a": 1e400, "b": ' + "9" * 4000,
    ],
    ids=range(6),
)
def test_what_clients_cannot_read_alike_is_written_as_the_model_wrote_it(arguments):
    events, whole = streamed_and_whole(
        call_of("messages"), FunctionCall("f", arguments, ended=False)
    )
    assert on_tape(events) == whole and whole["content"][0]["input"].keys() <= {*"abc", "input"}
    said = FunctionCall("f", arguments, ended=False)
    events, whole = streamed_and_whole(call_of("responses", custom=True), said)
    assert on_tape(events) == whole
    whole["output"][0]["input"].encode()  # half of a pair is none


def test_pieces_that_are_no_arguments_add_up_to_none():
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    start = [{"type": "message_start", "message": {"content": []}}]
    start += [{"type": "content_block_start", "index": 0, "content_block": block}]
    for text in ("", "]", "}}", "[1", '"x', "1", '{"a": [1}', "\ud800", '{"\ud800', "{" * 9999):
        piece = {"type": "input_json_delta", "partial_json": text}
        events = [*start, {"type": "content_block_delta", "index": 0, "delta": piece}]
        assert on_tape(events)["content"] == [block], text
