"""Chats with tools: calls whole and streamed, by the same clients, with ids that repeat."""

import json
from dataclasses import replace

import openai
import pytest
from canitoolcall.probe import BUILTIN_SCENARIOS, probe

from tests.lib.server.harness import MODEL, refused
from tests.server.parrot import probe_lessons
from tests.server.tool_server import MARKS, tool_server

END, OPENING, CLOSING, THINK, THOUGHT = map(chr, range(0xE002, 0xE007))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "says <tool_call> and <|im_end|>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "sights")
]
USER = [{"role": "user", "content": "a <tool_call> b"}]


def call(name="weather", arguments='{"city": "Köln"}'):
    return f'{OPENING}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSING}'


SECOND = '{"city":"\u00e9", "days": 2}'
TWO = f"Let me see.\n\n{call()}\n{call('sights', SECOND)}{END}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with tool_server(tmp_path_factory.mktemp("tools"), 2048) as found:
        yield found


def chat(server, text=TWO, **fields):
    body = {"model": MODEL, "messages": USER, "seed": 3, "tools": TOOLS, "max_tokens": 200}
    return server.http.post(
        "/v1/chat/completions", json=body | {"cache_salt": f"text={text}"} | fields
    )


def choice_of(found):
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


def events_of(found):
    assert found.status_code == 200, found.text
    *events, last, _ = found.text.split("\n\n")
    assert last.endswith("data: [DONE]")
    return [json.loads(event.partition("data: ")[2]) for event in events]


def joined(events):
    """The message and the finish reason that a stream's deltas make, as clients make them."""
    message, reason = {"role": "assistant", "content": None}, None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):  # whole but for its arguments
                    assert piece["type"] == "function" and piece["function"]["name"]
                    calls.append({**piece, "function": {**piece["function"]}})
                    del calls[-1]["index"]
                else:
                    assert {*piece} == {"index", "function"}
                    arguments = piece["function"]["arguments"]
                    calls[piece["index"]]["function"]["arguments"] += arguments
            reason = choice["finish_reason"] or reason
    assert events[-1]["choices"][0]["delta"] == {}
    return message, reason


def plain(choice):
    """A whole answer's message and finish reason, without reasoning and refusal."""
    silent = ("reasoning", "reasoning_content", "refusal")
    message = {k: v for k, v in choice["message"].items() if k not in silent}
    return message, choice["finish_reason"]


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "return_token_ids": True}], ids=str)
def test_a_stream_is_the_whole_answer_and_repeats_with_its_ids(server, more):
    found = chat(server, **more).json()
    message, reason = plain(found["choices"][0])
    assert reason == "tool_calls" and message["content"] == "Let me see."
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "weather", "arguments": '{"city": "K\u00f6ln"}'}
    assert second["function"] == {"name": "sights", "arguments": SECOND}
    assert first["id"] != second["id"] and all(len(c["id"]) == 29 for c in (first, second))
    events = events_of(chat(server, stream=True, **more))
    assert joined(events) == (message, reason)
    assert {event["id"] for event in events} == {found["id"]}
    again = chat(server, **more)
    assert again.json() | {"created": 0} == found | {"created": 0}
    assert again.headers["x-request-id"] not in again.text
    other = chat(server, seed=4).json()
    assert other["id"] != found["id"]
    assert other["choices"][0]["message"]["tool_calls"][0]["id"] != first["id"]
    ids = {
        one["id"]
        for choice in chat(server, n=2).json()["choices"]
        for one in choice["message"].get("tool_calls", ())
    }
    assert len(ids) == 4


def test_a_stream_goes_on_behind_any_cursor(server):
    streamed = {"accept": "text/event-stream"}

    def events(headers):
        body = {"model": MODEL, "messages": USER, "seed": 3, "tools": TOOLS, "max_tokens": 200}
        body |= {"cache_salt": f"text={TWO}", "stream": True}
        found = server.http.post("/v1/chat/completions", json=body, headers=streamed | headers)
        lines = [one.split("\ndata: ") for one in found.text.split("\n\n")[:-2]]
        return [
            (one[0].removeprefix("id: "), json.loads(one[-1].removeprefix("data: ")))
            for one in lines
        ]

    whole = events({})
    expected = joined([event for _, event in whole])
    named = [i for i, (cursor, event) in enumerate(whole) if not cursor.startswith("data: ")]
    assert len(named) > 10 and len(named) < len(whole)
    for place in [*named[:-1:3], *named[-4:-1]]:
        rest = events({"last-event-id": whole[place][0]})
        assert joined([event for _, event in (*whole[: place + 1], *rest)]) == expected


def test_an_answer_that_only_calls_has_no_content(server):
    alone = f"\n\n{call()}{END}"
    assert plain(choice_of(chat(server, alone)))[0]["content"] is None
    events = events_of(chat(server, alone, stream=True))
    assert joined(events)[0]["content"] is None
    thought = f"{THINK}why{THOUGHT}\n\n{call()}{END}"
    message = choice_of(chat(server, thought))["message"]
    assert (message["reasoning"], message["content"]) == ("why", None)
    assert len(message["tool_calls"]) == 1


def test_finish_reasons_say_who_ended_the_answer(server):
    def reason(text=TWO, **fields):
        found = choice_of(chat(server, text, **fields))
        streamed = joined(events_of(chat(server, text, stream=True, **fields)))
        assert streamed[1] == found["finish_reason"]
        return found["finish_reason"]

    assert reason("No.") == "length" and reason(f"No.{END}") == "stop"
    assert reason(call(), max_tokens=80) == "length"  # it has called, and was cut off
    named = {"type": "function", "function": {"name": "weather"}}
    assert reason(call() + END, tool_choice=named) == "stop"
    assert reason(call() + END, tool_choice="required") == "tool_calls"


def test_what_is_no_call_of_a_declared_tool_is_text(server):
    for text in (call("missing"), call(arguments="{"), "<tool_call>" + call()[1:]):
        message = choice_of(chat(server, text + END))["message"]
        assert "tool_calls" not in message and message["content"]
    none = chat(server, tool_choice="none").json()
    assert none["choices"][0]["message"]["content"].startswith("Let me see.\n\n<tool_call>")
    bare = chat(server, tools=[]).json()
    assert none["tpdet"] == bare["tpdet"] and none["usage"] == bare["usage"]


def test_a_call_in_which_max_tokens_cut_has_not_ended_whole_and_streamed(server):
    said, arguments = set(), '{"city": "K\u00f6ln"}'
    for most in range(1, 75):
        message, reason = plain(choice_of(chat(server, max_tokens=most)))
        streamed = chat(server, max_tokens=most, stream=True)
        assert joined(events_of(streamed)) == (message, reason)
        assert reason == "length"
        for made in message.get("tool_calls", ()):
            function = made["function"]
            assert function["name"] == "weather" and arguments.startswith(function["arguments"])
            said.add(function["arguments"])
        assert "Let me see.".startswith((message["content"] or "").strip())
    assert {"", "{", arguments} < said


def test_a_conversation_goes_on_with_what_was_answered(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        fields = {"model": MODEL, "tools": TOOLS, "seed": 3, "max_tokens": 200}
        salt = {"extra_body": {"cache_salt": f"text={TWO}"}}
        asked = client.chat.completions.create(messages=USER, **fields, **salt)
        message = asked.choices[0].message
        assert [one.function.name for one in message.tool_calls] == ["weather", "sights"]
        results = [
            {"role": "tool", "tool_call_id": one.id, "content": "<|im_end|>"}
            for one in message.tool_calls
        ]
        history = [*USER, message.model_dump(exclude_none=True), *results]
        salt = {"extra_body": {"cache_salt": f"text=Fine.{END}"}}
        last = client.chat.completions.create(messages=history, **fields, **salt)
        assert last.choices[0].message.content == "Fine." and not last.choices[0].message.tool_calls
        with pytest.raises(openai.BadRequestError, match="has no result"):
            client.chat.completions.create(messages=history[:-1], **fields)
        salt = {"extra_body": {"cache_salt": f"text={TWO}"}}
        with client.chat.completions.stream(messages=USER, **fields, **salt) as stream:
            names = [e.name for e in stream if e.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion().choices[0]
        assert names == ["weather", "sights"] and final.finish_reason == "tool_calls"
        assert [one.id for one in final.message.tool_calls] == [
            one.id for one in message.tool_calls
        ]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "are both called 'weather'"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, None, "x"),
        ({"tool_choice": "any"}, "tool_choice", "is not supported: send"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice",
         "which tools do not declare: name one of weather, sights"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"messages": [*USER, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
         "messages[1].tool_call_id", "no call before it waits for one"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "send one of the"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters":
          {"type": "object", "properties": {"a": {"not": {}}}}}}]}, "tools", "is not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 10**6}}]},
         "prompt", "over the model's context"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters":
          {"type": "object", "description": "x" * 300_000}}}]}, "prompt", "the model's context"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(server, fields, param, message):
    error = refused(chat(server, **fields), 400, param)
    assert message in error["message"], error


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_megabytes_of_schema_are_refused(server, strict):
    text = {"type": "string", "description": "some words"}
    many = {"type": "object", "properties": {f"p{i:06}": text for i in range(150_000)}}
    for schema, status, param, message in (
        (many, 400, "prompt", "over the model's context"),
        ({"type": "object", "description": "x" * 11_000_000}, 413, None, "over 10485760 bytes"),
    ):
        tool = {"name": "f", "strict": strict, "parameters": schema}
        found = chat(server, tools=[{"type": "function", "function": tool}])
        assert message in refused(found, status, param)["message"]


def test_a_grammar_of_calls_holds_behind_the_reasoning(server):
    def receipt(**fields):
        return chat(server, return_token_ids=True, **fields).json()["tpdet"]

    forced = receipt(tool_choice="required")
    assert forced["json_schema_after"] == [ord(mark) - 0xDF00 for mark in (THINK, THOUGHT)]
    named = {"json_schema_after": forced["json_schema_after"]}
    assert receipt(tool_choice="required", tpdet=named) == forced
    first = receipt(tool_choice="required", tpdet={"json_schema_after": []})
    assert "json_schema_after" not in first
    free = receipt()
    digests = {one["request_digest"] for one in (forced, first, free, receipt(tool_choice="none"))}
    assert len(digests) == 4
    refused(chat(server, tpdet=named), 400, "json_schema_after")


def test_an_answer_may_be_calls_or_the_json_that_was_asked_for(server):
    asked = {"response_format": {"type": "json_object"}, "max_tokens": 200}
    message = choice_of(chat(server, '{"a":1}' + END, **asked))["message"]
    assert message["content"] == '{"a":1}' and "tool_calls" not in message
    assert len(choice_of(chat(server, **asked))["message"]["tool_calls"]) == 2
    digests = [chat(server, **more).json()["tpdet"]["request_digest"] for more in ({}, asked)]
    assert digests[0] != digests[1]
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    error = refused(chat(server, response_format=wrong), 400)
    assert error["message"].startswith("the schema cannot be used: #/not is not supported")


def test_tokenize_counts_the_tools(server):
    body = {"model": MODEL, "messages": USER, "tools": TOOLS}
    found = server.http.post("/tokenize", json=body).json()
    assert found["count"] == chat(server).json()["usage"]["prompt_tokens"]
    assert server.http.get("/model_info").json()["tool_call_parser"] == "hermes"


def test_the_probe_of_canitoolcall_reads_every_answer(server):
    """Answers as a parrot gives them, but by an engine of fixed tokens."""
    marks = dict(zip(MARKS, (OPENING, CLOSING, THINK, THOUGHT), strict=True))
    scenarios = []
    for scenario, lesson in zip(BUILTIN_SCENARIOS, probe_lessons(), strict=True):
        text = lesson.answer + END
        for mark, token in marks.items():
            text = text.replace(mark, token)
        more = {**scenario.extra_body, "cache_salt": f"text={text}", "max_tokens": 400}
        scenarios.append(replace(scenario, extra_body=more))
    report = probe(server.url + "/v1", MODEL, scenarios=scenarios)
    assert report.summary() == {"pass": 27, "fail": 0, "error": 0, "skip": 0}, report.render_text()
    wrong = replace(scenarios[0], extra_body=scenarios[2].extra_body | {"max_tokens": 1})
    assert probe(server.url + "/v1", MODEL, scenarios=[wrong]).summary()["fail"] == 2
