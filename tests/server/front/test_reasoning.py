"""Chats whose reasoning is split off: whole, streamed, continued, left out."""

import json

import openai
import pytest

from tests.lib.server.harness import MODEL, TEMPLATE, Server, refused
from tests.server.streams import fatal_line

OPENING, CLOSING, END = 259, 260, 258
WHY, YES = "wh\xe9? ", "\n\u65e5es"
ANSWER = [OPENING, *WHY.encode(), CLOSING, *YES.encode(), END]
SCRIPT = {"cache_salt": "script=" + ".".join(map(str, ANSWER))}
MESSAGES = [{"role": "user", "content": "a <think> b"}]
STREAMED = {"accept": "text/event-stream"}
# With `thinking` true it opens the block itself, with false it closes it too.
THINKING = """\
{%- if thinking is defined %}<think>{% if not thinking %}</think>{% endif %}{% endif %}"""

# As gpt-oss's template does: a default of its own, unless the request names one.
EFFORT = """\
{%- if reasoning_effort is not defined %}{% set reasoning_effort = "" %}{% endif %}
{{- reasoning_effort }}"""


@pytest.fixture(scope="module")
def parsing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parsing")
    template = folder / "template.jinja"
    template.write_text(EFFORT + TEMPLATE + THINKING)
    flags = ("--reasoning-parser", "qwen3", "--chat-template", str(template))
    found = Server(folder, *flags, marks=("<think>", "</think>"))
    yield found
    assert found.stop() == 0, found.log.read_text()


def chat(server, headers=None, **fields):
    body = {"model": MODEL, "messages": MESSAGES, "seed": 3} | SCRIPT | fields
    return server.http.post("/v1/chat/completions", json=body, headers=headers)


def choice_of(found) -> dict:
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


def events_of(found) -> list[tuple[str, dict]]:
    """The cursor and the JSON of each event but the last."""
    assert found.status_code == 200, found.text
    *events, last, _ = found.text.split("\n\n")
    assert last.endswith("data: [DONE]")
    pairs = [event.removeprefix("id: ").split("\ndata: ") for event in events]
    return [(cursor, json.loads(data)) for cursor, data in pairs]


def joined(events) -> dict:
    """(reasoning, content, finish reason) of each choice."""
    found: dict = {}
    for _, event in events:
        for choice in event["choices"]:
            delta, before = choice["delta"], found.get(choice["index"], ("", "", None))
            assert delta.get("reasoning") == delta.get("reasoning_content")
            reasoning = before[0] + delta.get("reasoning", "")
            content = before[1] + delta.get("content", "")
            found[choice["index"]] = reasoning, content, choice["finish_reason"] or before[2]
    return found


def test_a_message_has_its_reasoning_under_both_names(parsing):
    found = chat(parsing)
    choice = choice_of(found)
    assert choice["message"] == {
        "role": "assistant",
        "content": YES,
        "reasoning": WHY,
        "reasoning_content": WHY,
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop"
    details = {"reasoning_tokens": len(WHY.encode())}
    assert found.json()["usage"]["completion_tokens_details"] == details
    assert parsing.http.get("/server_info").json()["reasoning_parser"] == "think"


def test_only_the_split_differs_from_the_raw_answer(parsing, server):
    """The same prompt as a completion, which stays raw: ids, bits and digest are the same."""
    shown = {"return_token_ids": True, "logprobs": True, "max_tokens": 40}
    found = chat(parsing, **shown).json()
    choice = found["choices"][0]
    assert choice["token_ids"] == ANSWER and len(choice["logprobs"]["content"]) == len(ANSWER)
    asked = SCRIPT | {"prompt": choice["prompt_token_ids"], "seed": 3, "max_tokens": 40}
    raw = parsing.complete(**asked, return_token_ids=True).json()
    assert raw["choices"][0]["text"] == f"<think>{WHY}</think>{YES}"
    assert raw["tpdet"] == found["tpdet"] and "completion_tokens_details" not in raw["usage"]
    for name in ("token_ids", "logprob_bits", "finish_reason"):
        assert raw["choices"][0][name] == choice[name]
    off = choice_of(chat(server))["message"]  # another tokenizer: the marks have no text
    assert off == {"role": "assistant", "content": WHY + YES, "refusal": None}


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "return_token_ids": True}], ids=str)
def test_a_stream_is_the_answer_and_goes_on_behind_any_event(parsing, more):
    fields = {"n": 2, "stop": ["es"], "max_tokens": 30, **more}
    whole = chat(parsing, **fields).json()
    expected = {
        choice["index"]: (
            choice["message"]["reasoning"] or "",
            choice["message"]["content"],
            choice["finish_reason"],
        )
        for choice in whole["choices"]
    }
    assert expected[0] == (WHY, "\n\u65e5", "stop")
    assert expected[1] == ("", f"{WHY}</think>\n\u65e5", "stop")  # nothing has opened a block
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(chat(parsing, STREAMED, **fields))
    assert joined(events) == expected
    assert events[-1][1]["usage"] == whole["usage"]
    for place in range(0, len(events), 3):
        cursor = {"last-event-id": events[place][0]}
        rest = events_of(chat(parsing, STREAMED | cursor, **fields))
        assert joined(events[: place + 1] + rest) == expected
        assert rest[-1][1]["usage"] == whole["usage"]
        assert rest[-1][1]["tpdet"] == events[-1][1]["tpdet"]


def test_the_openai_client_reads_both_parts(parsing):
    with openai.OpenAI(base_url=parsing.url + "/v1", api_key="none", max_retries=0) as client:
        fields = {"model": MODEL, "messages": MESSAGES, "seed": 3, "extra_body": SCRIPT}
        message = client.chat.completions.create(**fields).choices[0].message
        assert (message.content, message.reasoning, message.reasoning_content) == (YES, WHY, WHY)
        reasoning = content = ""
        for chunk in client.chat.completions.create(**fields, stream=True):
            delta = chunk.choices[0].delta
            reasoning += getattr(delta, "reasoning", "")
            content += delta.content or ""
        assert (reasoning, content) == (WHY, YES)
        # What a client has been given may be sent back.
        history = [*MESSAGES, message.model_dump(exclude_none=True), *MESSAGES]
        assert client.chat.completions.create(**fields | {"messages": history}).choices


def test_reasoning_can_be_left_out(parsing, server):
    for stream in (False, True):
        found = chat(parsing, include_reasoning=False, stream=stream)
        assert "reasoning" not in found.text.replace("reasoning_tokens", "")
    hidden = events_of(chat(parsing, STREAMED, include_reasoning=False, stream=True))
    shown = events_of(chat(parsing, STREAMED, include_reasoning=True, stream=True))
    assert joined(hidden) == {0: ("", YES, "stop")} and len(hidden) < len(shown)
    for more in ({}, {"metadata": {"x": "y" * 300_000}}):  # another process reads a large body
        message = choice_of(chat(parsing, include_reasoning=False, **more))["message"]
        assert message == {"role": "assistant", "content": YES, "refusal": None}
    error = refused(chat(server, include_reasoning=False), 400, "include_reasoning")
    assert error["code"] == "not_supported" and "--reasoning-parser" in error["message"]
    assert chat(server, include_reasoning=True).status_code == 200
    refused(parsing.complete(include_reasoning=False), 400, "include_reasoning")


def test_the_prompt_may_open_or_close_the_block(parsing):
    def message(thinking, script):
        salt = "script=" + ".".join(map(str, script))
        kwargs = {"thinking": thinking}
        found = chat(parsing, cache_salt=salt, chat_template_kwargs=kwargs, max_tokens=30)
        return choice_of(found)["message"]

    opened = message(True, ANSWER[1:])
    assert (opened["reasoning"], opened["content"]) == (WHY, YES)
    closed = message(False, ANSWER)
    assert closed["reasoning"] is None and closed["content"] == f"<think>{WHY}</think>{YES}"


def test_an_answer_may_end_inside_its_reasoning(parsing):
    found = choice_of(chat(parsing, max_tokens=3))
    assert (found["message"]["content"], found["message"]["reasoning"]) == ("", "wh")
    assert found["finish_reason"] == "length"
    last = joined(events_of(chat(parsing, STREAMED, max_tokens=3, stream=True)))
    assert last == {0: ("wh", "", "length")}


JSON = {"response_format": {"type": "json_object"}}
SHOWN = {"return_token_ids": True, "max_tokens": 40}


def mark_of(found) -> list[int] | None:
    """The mark behind which the answer's schema holds; None where it is not named."""
    return found.json()["tpdet"].get("json_schema_after")


def test_a_schema_holds_behind_the_reasoning(parsing, server):
    found = chat(parsing, **JSON, **SHOWN)
    message = choice_of(found)["message"]
    assert (message["reasoning"], message["content"]) == (WHY, YES)
    details = {"reasoning_tokens": len(WHY.encode())}
    assert found.json()["usage"]["completion_tokens_details"] == details
    assert mark_of(found) == [OPENING, CLOSING]
    streamed = events_of(chat(parsing, STREAMED, stream=True, **JSON, **SHOWN))
    assert joined(streamed) == {0: (WHY, YES, "stop")}
    assert streamed[-1][1]["tpdet"] == found.json()["tpdet"]
    for thinking, mark in ((True, [CLOSING]), (False, None)):
        kwargs = {"chat_template_kwargs": {"thinking": thinking}}
        found = chat(parsing, **JSON, **SHOWN, **kwargs)
        assert mark_of(found) == mark
    message = choice_of(found)["message"]  # the prompt has closed the block: all is content
    assert message["reasoning"] is None and message["content"].startswith("<think>")
    large = chat(parsing, **JSON, **SHOWN, metadata={"x": "y" * 300_000})
    assert mark_of(large) == [OPENING, CLOSING]  # another process reads a large body
    assert mark_of(chat(server, **JSON, **SHOWN)) is None


def test_a_body_may_name_the_mark_itself(parsing, server):
    """So that any server gives the answer of any other; the digest covers the mark."""
    found = chat(parsing, **JSON, **SHOWN).json()["tpdet"]
    named = {"tpdet": {"json_schema_after": [OPENING, CLOSING]}}
    assert chat(parsing, **JSON, **SHOWN, **named).json()["tpdet"] == found
    prompt = choice_of(chat(parsing, **SHOWN))["prompt_token_ids"]
    asked = SCRIPT | JSON | SHOWN | {"prompt": prompt, "seed": 3}
    assert parsing.complete(**asked, **named).json()["tpdet"] == found
    first = chat(parsing, **JSON, **SHOWN, tpdet={"json_schema_after": []})
    assert mark_of(first) is None and choice_of(first)["message"]["reasoning"] is None
    without = parsing.complete(**asked).json()["tpdet"]
    assert first.json()["tpdet"] == without != found
    message = refused(chat(server, **named), 400, "json_schema_after")["message"]
    assert "leave it out" in message
    outside = {"tpdet": {"json_schema_after": [512]}}
    refused(chat(server, **JSON, **outside), 400, "json_schema_after")


@pytest.mark.parametrize("cut", [2, -3])
def test_an_answer_with_a_schema_goes_on_in_its_reasoning_and_in_its_json(parsing, cut):
    fields = JSON | SHOWN | {"stream": True}
    events = events_of(chat(parsing, STREAMED, **fields))
    part = events[:cut]
    assert (joined(part)[0][1] == "") == (cut == 2)
    rest = events_of(chat(parsing, STREAMED | {"last-event-id": part[-1][0]}, **fields))
    assert joined(part + rest) == joined(events)
    assert rest[-1][1]["tpdet"] == events[-1][1]["tpdet"]
    ids = [i for _, e in part for choice in e["choices"] for i in choice["token_ids"]]
    origin = {key: part[0][1]["tpdet"][key] for key in ("contract", "weights", "seed")}
    resume = {"tpdet": {"resume": origin | {"choices": [ids]}}}
    rest = events_of(chat(parsing, STREAMED, **fields, **resume))
    assert joined(part + rest) == joined(events)
    assert rest[-1][1]["tpdet"] == events[-1][1]["tpdet"]


def test_two_names_of_a_messages_reasoning_must_agree(parsing):
    said = {"role": "assistant", "content": "x", "reasoning": "a"}
    for other, status in ((None, 200), ("a", 200), ("b", 400)):
        messages = [*MESSAGES, said | {"reasoning_content": other}, *MESSAGES]
        found = chat(parsing, messages=messages)
        assert found.status_code == status, found.text
    assert "send one of the two" in refused(found, 400, "messages[1].reasoning")["message"]


def test_marks_that_a_tokenizer_lacks_are_refused_at_start(tmp_path):
    found = Server(tmp_path, "--reasoning-parser", "openai_gptoss", wait=False)
    assert found.process.wait(20) == 2
    assert (
        "harmony: this tokenizer has no added tokens <|start|> and" in fatal_line(found)["message"]
    )


def test_the_effort_reaches_the_template_by_openais_name_too(parsing):
    def prompt(**fields) -> str:
        ids = choice_of(chat(parsing, max_tokens=1, return_token_ids=True, **fields))
        ids = {"tokens": ids["prompt_token_ids"]}
        return parsing.http.post("/detokenize", json=ids).json()["prompt"]

    low, high = ({"reasoning_effort": effort} for effort in ("low", "high"))
    assert prompt(**low) == "low" + prompt() == prompt(chat_template_kwargs=low)
    assert prompt(**low, chat_template_kwargs={"thinking": True}).endswith("<think>")
    error = refused(chat(parsing, **low, chat_template_kwargs=high), 400, *low)
    assert error["message"].endswith("differ: send one")
    refused(chat(parsing, reasoning_effort="lots"), 400, *low)
