"""Answers of a million log-probabilities: whoever else asks does not notice, and none is larger."""

import concurrent.futures
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.lib.server.harness import MODEL, Server, eventually, refused, request_bytes
from tests.lib.tree import ROOT
from tests.server.streams import running
from tpdet.requests.body import limits

pytestmark = pytest.mark.alone
PATH = "/v1/completions"
LENGTH, TOP = 8000, 20
MEMORY_BYTES = 200 << 20  # what the largest answer may cost: generated tokens cost most
PROMPTS = limits.MAX_LOGPROBS_IN_ANSWER // (LENGTH * TOP)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("s"), "--max-model-len", "8192")
    yield found
    assert found.stop() == 0, found.log.read_text()


@contextlib.contextmanager
def watched(server, *paths):
    """Seconds of each path's answers, asked from another process all the while."""
    command = [sys.executable, "-m", "tests.server.front.health_watch", str(server.port), *paths]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        seconds: dict[str, list[float]] = {}
        process.stdout.readline()
        yield seconds
        seconds |= json.loads(process.communicate()[0])
    assert process.returncode == 0


def gaps_of_a_stream(server, stop) -> list[float]:
    """Seconds between the events of another client's stream, until `stop`."""
    body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 8000, "ignore_eos": True}
    body |= {"cache_salt": "slow=0.01"}
    found, before = [], None
    with httpx.stream("POST", server.url + PATH, json=body, timeout=60) as events:
        for _ in events.iter_raw():
            now = time.monotonic()
            found += [now - before] if before is not None else []
            before = now
            if stop.is_set():
                return found
    raise AssertionError("the stream ended before the large answer")


def largest(**more):
    prompts = [[5 + i % 200 for i in range(LENGTH)]] * PROMPTS
    return {"model": MODEL, "prompt": prompts, "max_tokens": 0, "seed": 1} | more


LARGE = {
    "prompt_logprobs": largest(prompt_logprobs=TOP),
    "echo streamed": largest(echo=True, logprobs=TOP, stream=True),
    "echo": largest(echo=True, logprobs=TOP),
    "n": {
        "model": MODEL, "prompt": "x", "n": 128, "max_tokens": 400, "ignore_eos": True,
        "logprobs": TOP, "seed": 1,
    },
    "repeated prompts": {
        "model": MODEL, "prompt": [[5] * LENGTH], "n": 128, "max_tokens": 0,
        "return_token_ids": True,
    },
}  # fmt: skip
DEFAULT = ("prompt_logprobs", "echo streamed")


@pytest.mark.parametrize(
    "name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in LARGE]
)
def test_nobody_notices_the_largest_answer(server, name):
    before = server.canary()
    stop, memory = threading.Event(), server.child.memory_info().rss
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        gaps = pool.submit(gaps_of_a_stream, server, stop)
        eventually(lambda: running(server) == 1)
        with watched(server, "/health", "/metrics") as seconds:
            size = read(server, LARGE[name])
            memory = server.child.memory_info().rss - memory
        stop.set()
    print(f"\n{name}: {size >> 20} MiB, memory {memory >> 20:+d} MiB, gap {max(gaps.result()):.3f}")
    assert max(gaps.result()) < 1.0 and memory < MEMORY_BYTES
    for path, answers in seconds.items():
        ordered = sorted(answers)
        late = ordered[int(0.99 * len(ordered))]
        print(f"{path}: {len(ordered)}, P99 {late:.3f} s, at most {ordered[-1]:.3f} s")
        assert late < 0.1 and ordered[-1] < 0.5
    assert server.canary() == before


def post(body: bytes) -> bytes:
    """A request with this body."""
    kind = "Content-Type: application/json"
    return request_bytes(PATH, body, kind, f"Content-Length: {len(body)}")


def read(server, body) -> int:
    """Bytes of an answer, none of which is kept."""
    with httpx.stream("POST", server.url + PATH, json=body, timeout=300) as found:
        assert found.status_code == 200, found.read()
        return sum(map(len, found.iter_bytes()))


def test_a_large_answer_is_what_small_ones_are(server):
    prompts = [[5 + (i + j) % 200 for i in range(900)] for j in range(3)]
    fields = {"prompt_logprobs": 3, "echo": True, "logprobs": 2, "n": 2, "seed": 4}
    fields |= {"max_tokens": 40, "return_token_ids": True}
    whole = server.complete(prompt=prompts, **fields)
    assert "content-length" not in whole.headers and len(whole.content) > 500_000
    one = [server.complete(prompt=prompt, **fields).json()["choices"] for prompt in prompts]
    expected = [
        choice | {"index": i} for i, choice in enumerate(c for choices in one for c in choices)
    ]
    assert whole.json()["choices"] == expected
    del fields["prompt_logprobs"]
    events = server.complete(prompt=prompts, stream=True, **fields).text.split("\n\n")
    first = {c["index"]: c for c in (json.loads(e[6:])["choices"][0] for e in events[:6])}
    for choice in expected:
        shown = first[choice["index"]]
        assert shown["prompt_token_ids"] == choice["prompt_token_ids"]
        for name, values in choice["logprobs"].items():
            assert shown["logprobs"][name] == values[:901]


def test_a_client_of_http_1_0_gets_a_length(server):
    body = json.dumps({"prompt": [5] * 4000, "prompt_logprobs": 9, "max_tokens": 0}).encode()
    data = post(body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    head, _, answer = server.raw(data).partition(b"\r\n\r\n")
    assert f"content-length: {len(answer)}".encode() in head and b"transfer-encoding" not in head
    assert len(json.loads(answer)["choices"][0]["prompt_logprobs"]) == 4000


def test_a_client_that_leaves_a_large_answer_costs_nothing_more(server):
    body = json.dumps(LARGE["prompt_logprobs"]).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(post(body))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    time.sleep(0.3)
    used = server.child.cpu_times().user
    time.sleep(0.5)
    assert server.child.cpu_times().user - used < 0.1


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": [[5] * 8000] * 64, "prompt_logprobs": 20}, "prompt_logprobs",
         "10240000 log-probabilities (512000 prompt tokens x 20 alternatives); the limit is"),
        ({"prompt": [[5] * 8000] * 7, "echo": True, "logprobs": 20}, "echo", "56000 prompt tokens"),
        ({"n": 128, "max_tokens": 8000, "logprobs": 2}, "logprobs", "1024000 tokens to generate"),
        ({"prompt": [[5] * 8000] * 2, "n": 128, "return_token_ids": True}, "return_token_ids", ""),
        ({"prompt": [[5] * 8000] * 2, "n": 128, "echo": True, "stream": True}, "echo", ""),
    ],
)  # fmt: skip
def test_an_answer_that_may_become_too_large_is_refused_at_once(server, fields, param, says):
    error = refused(server.complete(**{"max_tokens": 0} | fields), 400, param)
    assert says in error["message"] and str(limits.MAX_LOGPROBS_IN_ANSWER) in error["message"]
    assert running(server) == 0


@pytest.mark.slow
def test_an_evaluation_batch_is_taken(server):
    """64 prompts of 2,048 tokens with one alternative, as evaluation harnesses score them."""
    prompts = [[5 + i % 200 for i in range(2047)]] * 64
    found = server.complete(prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0)
    choices = found.json()["choices"]
    assert len(choices) == 64
    assert {len(choice["logprobs"]["token_logprobs"]) for choice in choices} == {2048}
