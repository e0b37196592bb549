"""Approximate answers over HTTP: each says so from its first such token; strict ones never."""

import json
import os
from functools import partial

import pytest

from tests.lib.server.fake_engine import FakeEngine
from tests.lib.server.harness import MODEL, Server, eventually, refused
from tests.server.end_to_end.test_end_to_end import QUESTIONS, Served, ask
from tests.server.leader.test_canary import engine
from tpdet.server.leader import canary as canary_module
from tpdet.server.leader.canary import Canary


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path, "--canary-interval", "0")
    yield server
    assert server.stop() == 0


def chunks(answer):
    events = [event[6:] for event in answer.text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_an_answer_says_so_from_its_first_approximate_token_on(server):
    body = {"prompt": "hello", "seed": 1, "max_tokens": 6, "ignore_eos": True}
    before = server.complete(**body).json()
    assert before["system_fingerprint"] == "fp_fake" and before["tpdet"].keys() == {
        "seed",
        "request_digest",
        "replay_digest",
        "replay_version",
        "logprobs_mode",
    }
    assert server.http.get("/version").json()["arithmetic"] == "strict"
    assert server.metric("tpdet_approximate") == 0.0
    found = chunks(server.complete(**body, stream=True, cache_salt="approximate=3,slow=0.05"))
    names = [chunk["system_fingerprint"] for chunk in found]
    assert names == sorted(names) and names[0] == "fp_fake" and names[-1] == "fp_other"
    marked = {"seed": 1, "request_digest": None, "replay_digest": None, "approximate": True}
    marked |= {"logprobs_mode": "raw_logprobs"}
    assert found[-1]["tpdet"] == marked
    after = server.complete(**body).json()
    assert after["system_fingerprint"] == "fp_other" and after["tpdet"] == marked
    assert after["choices"] == before["choices"]  # the fake engine's tokens are what they were
    eventually(lambda: server.http.get("/version").json()["arithmetic"] == "approximate")
    info = server.http.get("/server_info").json()
    assert (info["arithmetic"], info["system_fingerprint"]) == ("approximate", "fp_other")
    assert server.metric("tpdet_approximate") == 1.0
    assert server.metric("tpdet_deterministic_slowdown_ratio") == 2.0


def test_an_approximate_answer_cannot_be_continued(server):
    """From its first approximate token on a stream makes its client forget the cursor."""
    body = {"model": MODEL, "prompt": "hello", "seed": 1, "max_tokens": 6, "stream": True}
    body |= {"ignore_eos": True, "cache_salt": "approximate=3"}
    post = partial(server.http.post, "/v1/completions", json=body)
    events = post(headers={"accept": "text/event-stream"}).text.split("\n\n")[:-1]
    ids = [event.partition("\n")[0] for event in events]
    assert all(line.startswith("id: 1.") for line in ids[:3])
    assert ids[3:] == ["id:"] * 4 and events[-1].endswith("data: [DONE]")
    found = post(headers={"last-event-id": ids[1].removeprefix("id: ")})
    error = refused(found, 400, "last-event-id")
    assert error["message"] == "an approximate answer cannot be resumed"


def test_one_approximate_prompt_marks_a_whole_answer(server):
    """Two prompts in one call; one seed and one fingerprint cover both."""
    found = server.complete(
        prompt=["one", "two"], seed=1, max_tokens=3, cache_salt="approximate=2", ignore_eos=True
    ).json()
    assert found["system_fingerprint"] == "fp_other" and found["tpdet"]["approximate"]


def test_the_canary_of_an_engine_that_became_approximate_is_silent(monkeypatch):
    monkeypatch.setattr(canary_module, "MOST_SHARE", 1e9)  # at once again
    source: FakeEngine = engine()
    canary = Canary(source, 1e-9)
    canary.learn()
    canary.begin_if_due()
    source.approximate, source.drift_after = True, 1
    while source.has_work:
        canary.take(source.step())
    canary.begin_if_due()
    assert not source.has_work and source.canaries == 2 and canary.healthy


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_approximate_server_answers_and_names_itself(tiny_model, tmp_path, tp):
    served = Served(tiny_model("qwen3", kv_heads=2), tmp_path, tp, "--approximate")
    try:
        for question in QUESTIONS[:2]:
            fields = dict(question)
            found = served.client.completions.create(model="tiny", **fields)
            assert found.choices[0].text
            assert found.system_fingerprint == served.ready["system_fingerprint"]
            assert found.system_fingerprint.startswith("tpdet-approximate-")
            assert found.model_extra["tpdet"]["approximate"] is True
            assert found.model_extra["tpdet"]["replay_digest"] is None
        version = served.client.with_options(base_url=served.ready["url"]).get(
            "/version", cast_to=object
        )
        assert version["arithmetic"] == "approximate"
    finally:
        assert served.end() == 0
    assert "approximate arithmetic, as asked" in served.log.read_text()


@pytest.mark.slow
def test_a_server_with_on_slowdown_calibrates_and_stays_strict(tiny_model, tmp_path):
    model, flags = tiny_model("qwen3", kv_heads=2), ["--max-num-seqs", "4"]
    flags += ["--on-slowdown", "approximate", "--max-slowdown", "0.99"]
    served = Served(model, tmp_path, 2, *flags)
    try:
        _, (fingerprint, digest) = ask(served.client, QUESTIONS[0])
        assert digest is not None and fingerprint == served.ready["system_fingerprint"]
        assert "approximate" not in fingerprint
    finally:
        assert served.end() == 0
    assert "if strict steps get too slow" in served.log.read_text()
    assert os.path.exists(served.run / "exit.json")
