"""A stream that was cut off goes on by a second server of another size, with an equal digest."""

import json

import httpx
import pytest

from tests.lib.server.served import Served

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
QUESTIONS = (
    {"prompt": "The for", "temperature": 0.9, "seed": 3, "max_tokens": 60, "n": 2, "stop": ["zq"]},
    {"prompt": "JSON:", "temperature": 1, "seed": 6, "max_tokens": 40, "response_format": FORMAT},
    {"prompt": "No:", "temperature": 1, "seed": 4, "max_tokens": 40,
     "structured_outputs": {"regex": "[a-z ]{30}"}},
    # Hundreds of tokens that are known: rows as long as prompts.
    {"prompt": [5, 6], "temperature": 1, "seed": 8, "max_tokens": 400, "ignore_eos": True,
     "frequency_penalty": 0.4, "logprobs": 1},
)  # fmt: skip


def stream(served, body, most=None, headers=None):
    """Events with their cursors, at most so many: the connection is closed behind them."""
    found = []
    asked = body | {"model": "tiny", "stream": True, "return_token_ids": True}
    headers = {"accept": "text/event-stream"} | (headers or {})
    url = served.url + "/completions"
    with httpx.stream("POST", url, json=asked, headers=headers, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        cursor = None
        for line in answer.iter_lines():
            if line.startswith("id: "):
                cursor = line.removeprefix("id: ")
            if line.startswith("data: {"):
                found.append((cursor, json.loads(line.removeprefix("data: "))))
                if len(found) == most:
                    break
    return found


def joined(events):
    """Of each choice its text, ids, bits and end; and what the last event says of the answer."""
    choices = {}
    for _, event in events:
        for choice in event["choices"]:
            told = choices.setdefault(choice["index"], {"text": "", "ids": [], "bits": []})
            told["text"] += choice["text"]
            told["ids"] += choice["token_ids"]
            told["bits"] += choice["logprob_bits"]
            told["end"] = choice["finish_reason"] or told.get("end")
    return choices, events[-1][1]["tpdet"]


def steps(served):
    """Steps that the engine took so far."""
    text = httpx.get(served.url.removesuffix("/v1") + "/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("tpdet_step_seconds_count")]
    return float(line.split()[-1])


@pytest.mark.slow
def test_a_stream_goes_on_at_another_size_with_the_digest_of_the_whole(tiny_model, tmp_path):
    model = tiny_model("qwen3", kv_heads=2)
    (tmp_path / "other").mkdir()
    first, second = Served(model, tmp_path, 2), Served(model, tmp_path / "other", 1)
    for question in QUESTIONS:
        whole = stream(first, question)
        expected = joined(whole)
        for cut in (3, len(whole) - 1):
            part = stream(first, question, cut)
            rest = stream(second, question, headers={"last-event-id": part[-1][0]})
            assert joined(part + rest) == expected
            choices, origin = joined(part)
            origin = part[0][1]["tpdet"]
            held = [choices[i]["ids"] if i in choices else [] for i in range(question.get("n", 1))]
            resume = {key: origin[key] for key in ("contract", "weights", "seed")}
            before = steps(second)
            rest = stream(second, question | {"tpdet": {"resume": resume | {"choices": held}}})
            assert joined(part + rest) == expected
            if cut > 350:
                assert steps(second) - before < 20  # of 400 tokens
        wrong = [*held[0][:-1], held[0][-1] ^ 1]
        body = question | {"model": "tiny", "tpdet": {"resume": resume | {"choices": [wrong]}}}
        refused = httpx.post(second.url + "/completions", json=body, timeout=120)
        assert refused.status_code == 409
        error = refused.json()["error"]
        place = f"tpdet.resume.choices[0][{len(wrong) - 1}]"
        assert (error["code"], error["param"]) == ("resume_mismatch", place)
    assert first.end() == 0 and second.end() == 0
