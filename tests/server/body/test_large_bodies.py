"""Bodies of megabytes: worked on elsewhere, so that nobody else waits, and to the same bits."""

import concurrent.futures
import contextlib
import json
import signal
import socket
import time

import httpx
import psutil
import pytest

from tests.lib.server.harness import MODEL, Server, eventually, request_bytes
from tpdet.requests.body import limits

pytestmark = pytest.mark.long

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
LARGE = limits.LARGE_BODY_BYTES + 1
KIND = "Content-Type: application/json"
# Cut to fit, so that its size alone does not refuse it.
HEAVY = {"model": MODEL, "prompt": "some words, " * 600_000, "truncate_prompt_tokens": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("s"))
    found.canary_before = found.canary()
    yield found
    assert found.canary() == found.canary_before
    assert found.stop() == 0, found.log.read_text()
    eventually(lambda: not any(map(is_alive, found.workers_seen)))


@pytest.fixture(autouse=True)
def same_processes(request):
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        assert server.child.is_running()
        server.workers_seen = workers(server)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs still; not where it is only uncollected."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def workers(server) -> list[psutil.Process]:
    """The processes that work on large bodies."""
    found = []
    for child in server.child.children():
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            found += [child] if "tpdet.server.body.worker" in child.cmdline() else []
    return found


def busy(server):
    """Becomes true once a worker has spent time on what is sent after this call."""
    former = {worker.pid: worker.cpu_times().user for worker in workers(server)}

    def is_busy() -> bool:
        found = workers(server)
        # A new one spends a second on its imports.
        return any(w.cpu_times().user > former.get(w.pid, 1.2) + 0.3 for w in found)

    return is_busy


def text(characters: int) -> str:
    return "some words, " * (characters // 12 + 1)


# --- the same answers ---------------------------------------------------------------------------


def test_a_large_body_gets_the_answer_of_a_small_one(server):
    """Blanks behind the object make it large; the answers' bits are the same."""
    for path, fields in (
        (PATH, {"prompt": "hello", "seed": 5, "max_tokens": 6, "logprobs": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "seed": 5, "max_tokens": 6}),
        ("/tokenize", {"prompt": "héllo", "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "<|im_end|>"}]}),
        ("/detokenize", {"tokens": [104, 105]}),
    ):
        body = json.dumps({"model": MODEL} | fields)
        found = [
            server.http.post(path, content=content, headers={"content-type": "application/json"})
            for content in (body, body.ljust(LARGE))
        ]
        assert [answer.status_code for answer in found] == [200, 200], found[1].text
        small, large = (answer.json() for answer in found)
        for name in ("choices", "usage", "tpdet", "tokens", "token_strs", "prompt"):
            assert small.get(name) == large.get(name), (path, name)
        assert found[0].headers["content-type"] == found[1].headers["content-type"]
    assert 1 <= len(workers(server)) <= 2


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": text(LARGE)}, "prompt", "tokens, over the model's context of 256"),
        ({"prompt": "x", "surprise": text(LARGE)}, "surprise", "unknown field"),
        ({"prompt": "x", "user": "u" * LARGE}, "user", "the limit is 256"),
        ({"prompt": [[1]] * 200_000}, "prompt", "the limit is 1024"),
    ],
)
def test_a_large_body_is_refused_as_a_small_one(server, fields, param, says):
    found = server.complete(**fields)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param) and says in error["message"]
    assert error["type"] == "invalid_request_error" and len(found.content) <= 4096


def test_a_large_body_that_is_no_json_is_refused(server):
    for body in (b"{" * LARGE, b'{"a":1,"a":2}'.ljust(LARGE), b'{"a":NaN}'.ljust(LARGE)):
        data = request_bytes(PATH, body, KIND, f"Content-Length: {len(body)}")
        assert server.raw(data).startswith(b"HTTP/1.1 400 ")


# --- nobody else waits --------------------------------------------------------------------------


def test_small_requests_and_health_stay_quick_while_large_texts_are_in(server):
    """Four chats that are cut. The median, as other tests run on this machine too."""
    body = {"model": MODEL, "max_tokens": 1, "truncate_prompt_tokens": 4}
    body |= {"messages": [{"role": "user", "content": text(600_000)}]}
    data = json.dumps(body).encode()
    kind = {"content-type": "application/json"}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        large = [
            pool.submit(httpx.post, server.url + CHAT, content=data, headers=kind, timeout=120)
            for _ in range(4)
        ]
        times = {"/health": [], PATH: []}
        while not all(future.done() for future in large):
            for path, seconds in times.items():
                began = time.monotonic()
                found = server.http.get(path) if path == "/health" else server.complete()
                seconds.append(time.monotonic() - began)
                assert found.status_code == 200
    assert [future.result().status_code for future in large] == [200] * 4
    for seconds in times.values():
        assert len(seconds) > 5 and sorted(seconds)[len(seconds) // 2] < 0.1, seconds


def test_a_client_that_goes_ends_the_work_on_its_body(server):
    data = json.dumps(HEAVY).encode()
    working = busy(server)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request_bytes(PATH, data, KIND, f"Content-Length: {len(data)}"))
        eventually(working, 40)
        before = {worker.pid for worker in workers(server)}
    eventually(lambda: before - {worker.pid for worker in workers(server)}, 2)
    assert server.complete(prompt=text(LARGE), truncate_prompt_tokens=4).status_code == 200


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGSEGV, signal.SIGXCPU)),
    ],
)
def test_a_worker_that_is_lost_costs_its_own_request_alone(server, number):
    data = json.dumps(HEAVY).encode()
    working = busy(server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(
            httpx.post,
            server.url + PATH,
            content=data,
            headers={"content-type": "application/json"},
            timeout=120,
        )
        eventually(working, 40)
        for worker in workers(server):
            worker.send_signal(number)
        assert found.result().status_code == 400
        assert "send less text" in found.result().json()["error"]["message"]
    assert server.complete(prompt=text(LARGE), truncate_prompt_tokens=4).status_code == 200


def test_workers_end_with_the_http_process(tmp_path):
    server = Server(tmp_path)
    assert server.complete(prompt=text(LARGE), truncate_prompt_tokens=4).status_code == 200
    left = workers(server)
    assert left
    server.child.kill()
    assert server.process.wait(10) == 75
    for worker in left:
        eventually(lambda worker=worker: not is_alive(worker))
