"""Three hundred mutants of valid bodies: no 5xx, one form of error, and nobody else is touched."""

import copy
import json
import random

import pytest

from tests.lib.server.harness import MODEL, Server, eventually

VALID = (
    ("/v1/completions", {
        "model": MODEL, "prompt": ["hello", "x"], "max_tokens": 3, "n": 2, "temperature": 0.5,
        "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 4, "stop": ["a", "bc"], "logprobs": 2,
        "echo": True, "logit_bias": {"5": 1.5}, "presence_penalty": 0.1, "user": "u",
        "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 1, "return_token_ids": True,
    }),
    ("/v1/completions", {
        "model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2, "stream": True,
        "stream_options": {"include_usage": True}, "frequency_penalty": -0.5,
        "repetition_penalty": 1.2, "truncate_prompt_tokens": 2, "cache_salt": "c",
    }),
    ("/v1/chat/completions", {
        "model": MODEL, "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 3, "stop": "q",
        "response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "strict": True,
            "schema": {"type": "object", "properties": {"a": {"enum": [1, "x"]}}},
        }}, "skip_special_tokens": False,
    }),
    ("/tokenize", {"model": MODEL, "prompt": "hello", "return_token_strs": True}),
    ("/detokenize", {"model": MODEL, "tokens": [104, 105]}),
)  # fmt: skip
ODD = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, 5e-324, "", "0",
    "x" * 300, "\x00", "é\u2028", "\U0001f600", "<|im_end|>", [], {}, [[]], [None], [[1], "x"],
    {"": ""}, {"a": {"b": [1]}}, ["x"] * 70, list(range(600)), [2**64], "__proto__",
    "' OR 1=1", "../../etc",
)  # fmt: skip
SMALL = {"BODY_TIMEOUT": 2.0}


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Paths of everything inside a JSON value."""
    found = [path] if path else []
    if not isinstance(value, dict | list):
        return found
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found += places(inner, (*path, key))
    return found


def mutate_value(body: dict, draw: random.Random) -> dict:
    """Replace, delete, add or wrap one thing somewhere."""
    body = copy.deepcopy(body)
    *outer, last = draw.choice(places(body))
    holder = body
    for key in outer:
        holder = holder[key]
    kind = draw.choice(("replace", "replace", "replace", "delete", "add", "wrap"))
    if kind == "delete":
        del holder[last]
    elif kind == "add" and isinstance(holder, dict):
        holder[draw.choice((f"{last}_", "constructor", "tools", "best_of"))] = draw.choice(ODD)
    elif kind == "wrap":
        holder[last] = draw.choice(([holder[last]], {"value": holder[last]}))
    else:
        holder[last] = draw.choice(ODD)
    return body


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    """Cut, double, swap or overwrite a piece."""
    first, last = sorted(draw.sample(range(len(data) + 1), 2))
    piece = data[first:last]
    kind = draw.randrange(5)
    if kind == 0:
        return data[:first] + data[last:]
    if kind == 1:
        return data[:last] + piece + data[last:]
    if kind == 2:
        return data[:first]
    if kind == 3:
        return data[:first] + piece[::-1] + data[last:]
    return data[:first] + bytes([draw.randrange(256)]) + data[first + 1 :]


def mutants(seed: int, count: int):
    """(path, body) of `count` mutants."""
    draw = random.Random(seed)
    for number in range(count):
        path, body = VALID[number % len(VALID)]
        for _ in range(draw.choice((1, 1, 2, 4))):
            if places(body):
                body = mutate_value(body, draw)
        text = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
        yield path, mutate_bytes(text, draw) if number % 3 == 0 else text


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("m"), limits=SMALL)
    yield found
    assert found.stop() == 0, found.log.read_text()


@pytest.mark.parametrize(("path", "body"), VALID)
def test_what_is_mutated_was_valid(server, path, body):
    assert server.http.post(path, json=body).status_code == 200


@pytest.mark.parametrize("seed", range(6))
def test_no_mutant_harms_anybody(server, seed):
    before = server.canary()
    refused = 0
    for path, body in mutants(seed, 50):
        found = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert found.status_code in (200, 400, 404), (path, body, found.text)
        assert found.headers["x-request-id"]
        if found.status_code != 200:
            refused += 1
            error = found.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert len(found.content) <= 4096
        elif b"data: " in found.content[:6]:
            assert found.content.endswith(b"data: [DONE]\n\n")
        assert server.canary() == before, (path, body)
    assert refused > 15  # else nothing was tried
    assert server.process.poll() is None and server.child.is_running()
    for count in ("tpdet_requests_running", "tpdet_requests_waiting"):
        eventually(lambda count=count: server.metric(count) == 0)
