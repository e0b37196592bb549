"""A stream of `/v1/responses` that its client left is the response that it had come to."""

from tpdet.tools.tape.responses import events_of, response_of

OUTPUT = [
    {"id": "rs_1", "type": "reasoning", "content": [{"type": "reasoning_text", "text": "why"}]},
    {"id": "msg_1", "type": "message", "content": [{"type": "output_text", "text": "Yes."}]},
    {"id": "fc_1", "type": "function_call", "name": "look", "arguments": "{}"},
    {"id": "ctc_1", "type": "custom_tool_call", "name": "patch", "input": "+a"},
]
RESPONSE = {"id": "resp_1", "object": "response", "status": "completed", "output": OUTPUT}


def test_a_cut_stream_has_what_was_said_before():
    events = [*events_of(RESPONSE)]
    assert response_of(events) == RESPONSE and response_of(events[:1])["output"] == []
    assert response_of([]) is None and response_of([{"choices": []}]) is None
    said = 0
    for number, event in enumerate(events):
        if not event["type"].endswith(".delta"):
            continue
        cut = response_of(events[: number + 1])["output"]
        assert cut[:said] == OUTPUT[:said] and len(cut) == said + 1
        assert cut[said] == {**OUTPUT[said], "status": "in_progress"}
        said += 1
    assert said == len(OUTPUT)
    begun = {"type": "response.output_text.delta", "output_index": 0}
    stream = [events[0], *({**begun, "delta": text} for text in ("Y", "es"))]
    assert response_of(stream)["output"] == [{"content": [{"type": "output_text", "text": "Yes"}]}]
