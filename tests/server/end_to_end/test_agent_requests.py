"""Two hundred requests of agents have one answer each: body, ids and bits, whatever happens.

At TP 1, 2 and 4, alone and in a crowd, whole and streamed, with drafts and without, with a prefix
that was kept and without one. TPDET_TEST_REQUESTS is another number of them.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.lib.models.parrot import make_parrot, probe_lessons
from tests.lib.server.agent_requests import agent_requests, without_free
from tests.lib.server.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

COUNT = int(os.environ.get("TPDET_TEST_REQUESTS", "200"))
FLAGS = ("--device", "cpu", "--tool-call-parser", "auto", "--reasoning-parser", "auto")
COLD = "--no-enable-prefix-caching"
TEXTS = ("content", "reasoning", "reasoning_content")
LISTS = ("token_ids", "logprob_bits")


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents") / "model"
    make_parrot(folder, probe_lessons())
    return folder


@pytest.fixture(scope="module")
def bodies():
    return agent_requests(COUNT, "tiny", [lesson.body for lesson in probe_lessons()])


class Client:
    """Asks one server for answers, whole or streamed."""

    def __init__(self, served):
        self._http = httpx.Client(base_url=served.url, timeout=3600)
        self._metrics = served.url.removesuffix("/v1") + "/metrics"

    @property
    def cached(self):
        """Tokens of prompts that were kept from earlier ones."""
        lines = self._http.get(self._metrics).text.splitlines()
        counts = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total{")]
        return sum(float(line.split()[-1]) for line in counts)

    def answers(self, bodies, at_once, stream=False):
        """What each body is answered, as a whole answer without its free fields."""
        ask = self._streamed if stream else self._whole
        with ThreadPoolExecutor(at_once) as pool:
            return [*pool.map(ask, bodies)]

    def _whole(self, body):
        found = self._http.post("chat/completions", json=body)
        assert found.status_code == 200, found.text
        return without_free(found.json(), body)

    def _streamed(self, body):
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        found = self._http.post("chat/completions", json=asked)
        assert found.status_code == 200, found.text
        *events, done = [e.partition("data: ")[2] for e in found.text.strip().split("\n\n")]
        assert done == "[DONE]", done
        return without_free(joined([json.loads(event) for event in events]), body)


def joined(events):
    """The whole answer that a stream's events are of."""
    answer, choices = {**events[-1], "object": "chat.completion", "choices": []}, {}
    for event in events:
        for key in event.keys() - {"choices", "usage", "tpdet", "object", "created"}:
            assert event[key] == answer[key], key
        answer["tpdet"] = answer.get("tpdet", {}) | event.get("tpdet", {})
        for piece in event["choices"]:
            _add(choices.setdefault(piece["index"], {"index": piece["index"]}), piece)
    answer["choices"] = [choices[index] for index in sorted(choices)]
    # Of a chat's one prompt: a whole answer has it beside its choices too.
    return {**answer, "prompt_token_ids": answer["choices"][0]["prompt_token_ids"]}


def _add(choice, piece):
    """Add a piece of a stream to a choice, as a client does."""
    message = choice.setdefault("message", {})
    for key, value in piece.items():
        if key in LISTS:
            choice[key] = choice.get(key, []) + value
        elif key == "logprobs" and value and choice.get(key):
            choice[key]["content"] += value["content"]
        elif key != "delta" and (value is not None or key not in choice):
            choice[key] = value
    for key, value in piece["delta"].items():
        if key in TEXTS:
            message[key] = (message.get(key) or "") + (value or "")
        elif key != "tool_calls":
            message[key] = value
    for part in piece["delta"].get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append({k: v for k, v in part.items() if k != "index"})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def plain(answer):
    """An answer whose messages lack what they say nothing in: streams have no nulls."""
    choices = [
        {**choice, "message": {k: v for k, v in choice["message"].items() if v}}
        for choice in answer["choices"]
    ]
    return {**answer, "choices": choices}


@pytest.fixture(scope="module")
def expected(parrot, bodies, tmp_path_factory):
    """The answers of one rank, one at a time, without drafts and without a kept prefix."""
    served = Served(parrot, tmp_path_factory.mktemp("first"), 1, *FLAGS, COLD, "--drafts", "off")
    try:
        client = Client(served)
        found = client.answers(bodies, 1)
        assert client.cached == 0
    finally:
        served.end()
    calls = [
        c for a in found for choice in a["choices"] for c in choice["message"].get("tool_calls", ())
    ]
    free = sum(body.get("tool_choice") == "auto" for body in bodies)
    print(f"\n{len(found)} requests ({free} auto), {len(calls)} calls")
    assert len({call["id"] for call in calls}) == len(calls) > COUNT // 4
    assert len({answer["tpdet"]["request_digest"] for answer in found}) == len(found)
    return found


@pytest.mark.parametrize(("tp", "drafts"), [(1, "earlier"), (2, "off"), (4, "auto")])
def test_each_request_has_one_answer(parrot, bodies, expected, tmp_path, tp, drafts):
    served = Served(parrot, tmp_path, tp, *FLAGS, "--drafts", drafts)
    try:
        client = Client(served)
        whole = client.answers(bodies, 16)
        differ = [
            i for i, pair in enumerate(zip(whole, expected, strict=True)) if pair[0] != pair[1]
        ]
        assert not differ, (bodies[differ[0]], whole[differ[0]], expected[differ[0]])
        streamed = client.answers(bodies, 16, stream=True)
        for body, one, other in zip(bodies, streamed, expected, strict=True):
            assert plain(one) == plain(other), body
        assert client.cached > 256 * COUNT // 4
        # The control: what is compared depends on the request.
        (other,) = client.answers([bodies[0] | {"seed": 10**6}], 1)
        assert other["id"] != expected[0]["id"] and other["tpdet"] != expected[0]["tpdet"]
        print(
            f"\nTP {tp}, drafts {drafts}: {len(whole)} whole and {len(streamed)} streamed equal; "
            f"{client.cached:.0f} prompt tokens were kept"
        )
    finally:
        served.end()
