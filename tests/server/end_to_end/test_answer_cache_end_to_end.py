"""Answers that one server computed are given by another, of another size, byte for byte."""

import json
import re

import httpx
import pytest

from tests.lib.server.served import Served

pytestmark = pytest.mark.slow

COMPLETIONS, CHATS = "/completions", "/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALLS = [
    (COMPLETIONS, {"prompt": "The for statement", "seed": 1, "n": 3}),
    (COMPLETIONS, {"prompt": ["one", "two"], "temperature": 0, "seed": 2, "echo": True}),
    (COMPLETIONS, {"prompt": "abc", "seed": 3, "stop": ["e", "a", " "], "max_tokens": 40}),
    (COMPLETIONS, {"prompt": "x", "seed": 4, "structured_outputs": {"choice": ["yes", "no"]}}),
    (COMPLETIONS, {"prompt": "x", "seed": 5, "structured_outputs": {"regex": "[ab]{3}c?"}}),
    (COMPLETIONS, {"prompt": "x", "seed": 6, "frequency_penalty": 1.0, "top_p": 0.8}),
    (COMPLETIONS, {"prompt": "own"}),  # its seed is its own
    *(
        (
            CHATS,
            {
                "messages": [{"role": "user", "content": "who?"}],
                "seed": seed,
                "max_tokens": 60,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "one", "schema": SCHEMA},
                },
            },
        )
        for seed in range(4)
    ),
    (CHATS, {"messages": [{"role": "user", "content": "hi"}], "seed": 8, "logprobs": True}),
]


def ask(served, path, fields, stream):
    """How the answer came about, and its bytes without its names."""
    body = {"model": "tiny", "max_tokens": 12, "return_token_ids": True, "stream": stream} | fields
    headers = {"accept": "text/event-stream"} if stream else {}
    answer = httpx.post(served.url + path, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    text = re.sub(r'"id":"[^"]*"', '"id":"-"', answer.text)
    return answer.headers.get("cache-status"), re.sub(r'"created":\d+', '"created":0', text)


def answers(served, stream):
    return [ask(served, path, fields, stream) for path, fields in CALLS]


def by_choice(stream):
    """What a stream says of each choice, in order."""
    choices = {}
    for event in re.findall(r"data: ({.*)", stream):
        for choice in json.loads(event)["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    return choices


def test_what_one_rank_computed_two_ranks_give_again(tiny_model, tmp_path):
    model = tiny_model("qwen3", kv_heads=2)
    flags = ("--answer-cache", str(tmp_path / "answers"), "--seed-policy", "request")
    texts = []
    for tp, kept in ((1, flags), (2, flags), (2, flags[2:])):
        folder = tmp_path / f"{tp}-{len(kept)}"
        folder.mkdir()
        served = Served(model, folder, tp, *kept)
        texts.append([answers(served, stream) for stream in (False, True)])
        assert served.end() == 0
    first, second, without = texts
    assert {status for status, _ in first[0]} == {"tpdet; fwd=miss"}
    assert {status for part in (first[1], *second) for status, _ in part} == {"tpdet; hit"}
    assert {status for part in without for status, _ in part} == {None}
    for part in (0, 1):
        given, computed = ([text for _, text in texts[part]] for texts in (second, without))
        for (_, fields), one, other in zip(CALLS, given, computed, strict=True):
            if part == 1 and (fields.get("n") or isinstance(fields.get("prompt"), list)):
                one, other = by_choice(one), by_choice(other)  # their order is the load's
            assert one == other, fields
    reasons = re.findall(r'"finish_reason":"(\w+)"', "".join(text for _, text in second[0]))
    assert {*reasons} == {"stop", "length"}
