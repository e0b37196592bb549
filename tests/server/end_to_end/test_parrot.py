"""A model that calls tools by itself, behind a real server: the suites that ask servers of chats.

canitoolcall's probe and sampled calls: the same answers at TP 1 and 2, with drafts and without,
whole and streamed. llm-comply: what is not passed is named.
"""

import importlib.util
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from canitoolcall.probe import probe

from tests.lib.server.served import Served
from tests.server.parrot import Lesson, called, make_parrot, probe_lessons
from tpdet.launch.host.interpreter import python_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FLAGS = ("--device", "cpu", "--tool-call-parser", "auto", "--reasoning-parser", "auto")
SEEDS = range(3)
AT_ONCE = 8  # requests


def comply_lessons():
    """What answers each chat of llm-comply that has an answer; none without the package."""
    if importlib.util.find_spec("llm_comply") is None:
        return []
    from llm_comply.config import ComplianceConfig
    from llm_comply.tests import get_tests

    config = ComplianceConfig(base_url="", api_key="", model="tiny")
    answers = {
        "chat-basic-response": "Hello to you.",
        "chat-system-prompt": "Hello.",
        "chat-multi-turn": "Alice",
        "chat-tool-calling": called("get_weather", location="San Francisco"),
        "chat-streaming-response": "1, 2, 3, 4, 5",
        "chat-streaming-usage": "Word.",
    }
    bodies = {case.id: case.build_request(config) for case in get_tests("openai-chat")}
    return [Lesson(bodies[name], answer) for name, answer in answers.items()]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parrot") / "model"
    learnt = make_parrot(folder, [*probe_lessons(), *comply_lessons()])
    print(f"\nparrot: {learnt.steps} steps, {learnt.seconds:.0f} s, worst {learnt.worst:.3f}")
    return folder


@pytest.fixture(scope="module")
def answers():
    """What each server has said, by the request: filled by the first, compared by the others."""
    return {}


@pytest.mark.parametrize("drafts", ["off", "earlier"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_probe_passes_and_all_servers_say_the_same(parrot, answers, tmp_path, tp, drafts):
    served = Served(parrot, tmp_path, tp, *FLAGS, "--drafts", drafts)
    try:
        report = probe(served.url, "tiny")
        print(f"\nprobe, TP {tp}, drafts {drafts}: {report.summary()}")
        assert report.summary() == {"pass": 27, "fail": 0, "error": 0, "skip": 0}, (
            report.render_text()
        )
        bodies = [
            lesson.body | {"model": "tiny", "temperature": 1.0, "seed": seed}
            for lesson in probe_lessons()
            for seed in SEEDS
        ]
        with (
            httpx.Client(base_url=served.url, timeout=600) as http,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            for body, said in zip(bodies, pool.map(lambda b: _said(http, b), bodies), strict=True):
                assert answers.setdefault(json.dumps(body), said) == said
            metrics = http.get(served.url.removesuffix("/v1") + "/metrics").text
        assert (_accepted(metrics) > 100) == (drafts != "off"), metrics
        calls = sum(len(message.get("tool_calls", ())) for message, *_ in answers.values())
        drafted = _accepted(metrics)
        print(
            f"sampled: {len(answers)} chats, {calls} calls; {drafted:.0f} draft tokens were right"
        )
        assert calls >= 0.8 * 8 * len(SEEDS)  # of eight that were learnt
    finally:
        served.end()


def test_llm_comply_passes_but_for_what_is_named(parrot, tmp_path):
    pytest.importorskip("llm_comply")
    served = Served(parrot, tmp_path, 1, *FLAGS)
    try:
        flags = ("--base-url", served.url, "--api-key", "none", "--model", "tiny")
        command = [*python_command("-m", "llm_comply.cli"), "--format", "openai-chat", *flags]
        done = subprocess.run([*command, "--timeout", "600", "--json"], capture_output=True)
    finally:
        served.end()
    found = {one["id"]: one for one in json.loads(done.stdout)["results"]}
    others = {name: one for name, one in found.items() if one["status"] != "passed"}
    print(f"\nllm-comply: {len(found) - len(others)} of {len(found)}, but for {[*others]}")
    assert {name: one["errors"][0] for name, one in others.items()} == {
        "chat-image-input": "HTTP 400 (expected [200])",  # text is the only kind of content
        "chat-reasoning-summary": "reasoning requires o-series or gpt-5 models",  # its own choice
        "chat-error-handling": "HTTP 200 (expected [400, 422])",  # model may be left out
    }
    assert len(found) == 9


def _said(http, body):
    """The message, its ending and digests of a chat; a stream of it says the same."""
    whole = http.post("chat/completions", json=body).raise_for_status().json()
    streamed = http.post("chat/completions", json=body | {"stream": True}).raise_for_status().text
    *events, done = [e.partition("data: ")[2] for e in streamed.strip().split("\n\n")]
    assert done == "[DONE]"
    (choice,) = whole["choices"]
    message = {k: v for k, v in choice["message"].items() if v}
    joined, reason, last = {"role": "assistant"}, None, None
    for event in map(json.loads, events):
        last = event.get("tpdet", last)
        assert event["id"] == whole["id"]
        for piece in event["choices"]:
            reason = piece["finish_reason"] or reason
            for key, value in piece["delta"].items():
                if key == "tool_calls":
                    _add_calls(joined.setdefault(key, []), value)
                elif key != "role" and value:
                    joined[key] = joined.get(key, "") + value
    assert (joined, reason) == (message, choice["finish_reason"])
    return message, reason, whole["tpdet"], last


def _add_calls(calls, pieces):
    for piece in pieces:
        if piece["index"] == len(calls):
            calls.append({k: v for k, v in piece.items() if k != "index"})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def _accepted(metrics):
    """Draft tokens that were right, whoever proposed them."""
    name = "vllm:spec_decode_num_accepted_tokens_total{"
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))
