"""`--logprobs-mode processed_logprobs` over HTTP: every form of an answer names it."""

import json
import math

import httpx
import pytest

from tests.lib.server.served import Served

pytestmark = pytest.mark.slow

MODE = "processed_logprobs"


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    model = tiny_model("qwen3", kv_heads=2)
    found = Served(model, tmp_path_factory.mktemp("mode"), 2, "--logprobs-mode", MODE)
    yield found
    assert found.end() == 0


def post(server, path, **body):
    fields = {"model": "tiny", "max_tokens": 5, "seed": 7, "ignore_eos": True}
    answer = httpx.post(f"{server.url}{path}", json=fields | body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def test_the_server_says_its_mode(server):
    facts = httpx.get(server.ready["url"] + "/server_info?config_format=json").json()
    assert facts["logprobs_mode"] == MODE
    assert facts["vllm_config"]["model_config"]["logprobs_mode"] == MODE


def test_completions_name_it_and_hold_no_removed_id(server):
    body = {"prompt": "The for", "temperature": 0.8, "top_k": 3, "logprobs": 5}
    answer = post(server, "/completions", **body)
    assert "-9999" not in answer.text and answer.json()["tpdet"]["logprobs_mode"] == MODE
    for top in answer.json()["choices"][0]["logprobs"]["top_logprobs"]:
        assert len(top) == 3 and math.fsum(map(math.exp, top.values())) == pytest.approx(1.0)
    events = post(server, "/completions", stream=True, **body).text.split("\n\n")
    chunks = [json.loads(event[event.index("data: ") + 6 :]) for event in events[:-2]]
    assert chunks[-1]["tpdet"] == answer.json()["tpdet"]
    shown = [top for chunk in chunks for top in chunk["choices"][0]["logprobs"]["top_logprobs"]]
    assert shown == answer.json()["choices"][0]["logprobs"]["top_logprobs"]


def test_a_schema_removes_ids_too(server):
    """Each token of an answer that is one of two texts is one of few, and often the only one."""
    answer = post(
        server,
        "/completions",
        prompt="A",
        temperature=1.0,
        structured_outputs={"choice": ["yes", "no"]},
        logprobs=20,
    )
    assert "-9999" not in answer.text
    tops = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert all(math.fsum(map(math.exp, top.values())) == pytest.approx(1.0) for top in tops)
    assert min(map(len, tops)) < 20


def test_chats_name_it_and_scores_of_prompts_are_raw(server):
    messages = [{"role": "user", "content": "Hello"}]
    chat = post(
        server, "/chat/completions", messages=messages, top_p=0.3, logprobs=True, top_logprobs=4
    )
    assert "-9999" not in chat.text and chat.json()["tpdet"]["logprobs_mode"] == MODE
    scores = [
        post(server, "/completions", prompt="The for", prompt_logprobs=1, temperature=t, top_k=k)
        for t, k in ((1.0, 0), (0.5, 2))
    ]
    first, second = (answer.json()["choices"][0]["prompt_logprobs"] for answer in scores)
    assert first == second
