"""Every limit of the server's own table is kept, and nothing past one of them harms anybody."""

import asyncio
import json
import subprocess
import sys
import threading

import psutil
import pytest

from tests.lib.server.harness import Server, eventually
from tests.server.field_limits import FIELD_LIMITS, post, values
from tests.server.limit_attempt import Attempt
from tests.server.wire_limits import WIRE_LIMITS
from tpdet.grammar import trial
from tpdet.requests.body.limits import all_limits
from tpdet.requests.body.problems import ApiError
from tpdet.server.front.schema_trials import SchemaTrials

ATTEMPTS = FIELD_LIMITS | WIRE_LIMITS
# Tried in tests of their own: what they cost, and what they need, is another thing.
ELSEWHERE = {
    "schema_cpu_seconds": "tests/grammar/test_grammar.py",
    "schemas_waiting": "test_more_schemas_than_may_wait_are_refused_at_once",
    "chat_template_cpu_seconds": "tests/server/body/test_template_bounds.py",
    "held_request_bytes": "tests/server/http1/test_held_bytes.py",
    "repeated_characters": "tests/server/body/test_agent_bodies.py",
    "large_body_bytes": "tests/server/body/test_large_bodies.py",
    "large_bodies_waiting": "tests/server/body/test_body_worker.py",
    "large_body_cpu_seconds": "tests/server/body/test_large_bodies.py",
    "large_body_memory_bytes": "tests/server/body/test_body_worker.py",
    "pooled_inputs": "tests/server/end_to_end/test_pooling.py",
    "tool_bytes": "tests/grammar/test_tool_calls.py",
    "slow_reader_timeout_seconds": "tests/server/end_to_end/test_life_cycle.py",
    **dict.fromkeys(
        (
            "file_bytes",
            "files",
            "batch_requests",
            "batches_open",
            "file_timeout_seconds",
            "batch_seconds",
        ),
        "tests/server/batches/test_batches.py",
    ),
    "batch_sequences": "tests/server/batches/test_room.py",
    "batch_prompt_tokens": "tests/server/batches/test_room.py",
    "retry_after_seconds": "test_more_schemas_than_may_wait_are_refused_at_once",
}
SHORT = {"HEADER_TIMEOUT": 0.6, "BODY_TIMEOUT": 0.6, "KEEP_ALIVE_TIMEOUT": 2.0}
TIMES = {f"{name.lower()}_seconds": seconds for name, seconds in SHORT.items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("s"), limits=SHORT, vocab_size=2048)
    yield found
    assert found.stop() == 0, found.log.read_text()


@pytest.fixture(scope="module")
def info(server):
    """What the server says of itself; its times are shorter here than it believes."""
    found = server.http.get("/server_info").json()
    found["limits"] |= TIMES
    return found


def everyone(server) -> list[int]:
    """The server's processes, oldest first; those that try schemas come and go."""
    rank = psutil.Process(server.process.pid)
    return [rank.pid, *(child.pid for child in rank.children())]


@pytest.fixture(autouse=True)
def unharmed(server):
    """The same processes answer with the same bits, and nobody is left running or waiting."""
    before, who = server.canary(), everyone(server)
    yield
    assert server.canary() == before and everyone(server) == who
    for name in ("tpdet_requests_running", "tpdet_requests_waiting"):
        eventually(lambda name=name: server.metric(name) == 0)


def test_every_limit_that_the_server_prints_is_tried():
    command = [sys.executable, "-m", "tpdet.serve", "--print-limits"]
    printed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert printed == json.loads(json.dumps(all_limits()))
    assert printed.keys() == ATTEMPTS.keys() | ELSEWHERE.keys()
    assert not ATTEMPTS.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("name", ATTEMPTS)
def test_a_limit_is_kept_at_its_boundary_one_past_it_and_far_past_it(server, info, name):
    attempts = ATTEMPTS[name](info["limits"][name])
    assert attempts
    for attempt in attempts:
        attempt.check(server)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMES)
def test_the_times_that_are_printed_are_those_that_are_kept(tmp_path, name):
    server = Server(tmp_path)
    try:
        for attempt in ATTEMPTS[name](server.http.get("/server_info").json()["limits"][name]):
            attempt.check(server)
    finally:
        assert server.stop() == 0


def test_the_vocabulary_and_the_context_are_limits_too(server, info):
    vocabulary, context = info["vocab_size"], info["max_model_len"]
    past = (vocabulary, -1, 2**31, 10**30)
    attempts = [
        *values("prompt", ([0, vocabulary - 1],), ([token] for token in past)),
        *values("stop_token_ids", ([vocabulary - 1],), ([token] for token in past)),
        *values("logit_bias", ({str(vocabulary - 1): 1},), ({str(t): 1} for t in past)),
        *values("prompt", ([5] * (context - 1),), ([5] * (context + 1), [5] * 10**6)),
        *values("max_tokens", (0, context - 1), (2**31, 10**30, -1)),
        *values("max_tokens", (context - 3,), (), prompt=[1, 2, 3]),
        Attempt(
            "one past",
            post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": context - 2}),
            400,
            "max_tokens",
        ),
    ]
    for attempt in attempts:
        attempt.check(server)


def test_more_schemas_than_may_wait_are_refused_at_once(monkeypatch):
    limits, tried = all_limits(), threading.Event()
    monkeypatch.setattr(trial, "check", lambda schema: tried.wait(30))

    async def run() -> ApiError:
        trials = SchemaTrials()
        tasks = [asyncio.create_task(trials.check("{}")) for _ in range(limits["schemas_waiting"])]
        await asyncio.sleep(0)
        try:
            with pytest.raises(ApiError) as refused:
                await asyncio.wait_for(trials.check("{}"), 5)
        finally:
            tried.set()
        await asyncio.gather(*tasks)
        await trials.check("{}")  # there is room again
        return refused.value

    error = asyncio.run(run())
    assert (error.status, error.code) == (503, "engine_overloaded")
    assert ("retry-after", str(limits["retry_after_seconds"])) in error.headers


def test_a_limit_that_is_not_kept_is_seen(server, info):
    """Negative control: the attempts made for another number fail."""
    for name in ("n", "top_p", "stop_string_bytes", "headers", "body_bytes", "json_depth"):
        value = info["limits"][name]
        wrong = [value[0], value[1] * 2] if isinstance(value, list) else value * 2
        with pytest.raises(AssertionError):
            for attempt in ATTEMPTS[name](wrong):
                attempt.check(server)
