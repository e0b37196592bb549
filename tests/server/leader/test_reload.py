"""`tpdet reload` against servers on a FakeEngine: it drains, loads, and no answer mixes weights."""

import asyncio
import concurrent.futures
import contextlib
import io
import json
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from tests.lib.server.harness import MODEL, Server, eventually
from tests.server.streams import in_background, running
from tpdet import cli
from tpdet.launch.life import reload_request
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import Request, SamplingParams
from tpdet.server.front.engine_client import EngineClient
from tpdet.server.front.metrics import Metrics
from tpdet.server.wire.protocol import Accepted, Status

pytestmark = pytest.mark.long
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One for all tests that leave it serving, whatever weights it has."""
    found = Server(tmp_path_factory.mktemp("server"), "--canary-interval", "3600")
    yield found
    assert found.stop() == 0


def reload(server, *flags, code=0):
    """Run `tpdet reload`; what it printed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        found = cli.main(["reload", str(server.run), *flags])
    assert found == code, text.getvalue()
    return text.getvalue()


def names(answer):
    body = answer.json()
    return body["system_fingerprint"], body["tpdet"]["replay_digest"]


def test_new_answers_name_the_new_weights_and_so_does_ready_json(server):
    first = names(server.complete(seed=1))
    assert "second loaded in" in reload(server, "--model", "second")
    second = names(server.complete(seed=1))
    assert second[0] == "fp_second" and second[1] != first[1]
    ready = json.loads((server.run / "ready.json").read_text())
    assert ready["system_fingerprint"] == "fp_second"
    assert server.http.get("/server_info").json()["system_fingerprint"] == "fp_second"
    assert "fp_first" in reload(server)  # the server's own --model
    assert names(server.complete(seed=1))[0] == "fp_first"


def test_running_streams_finish_under_the_old_weights_and_new_requests_are_refused(server):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = in_background(pool, server, 3, cache_salt="slow=0.1", max_tokens=14)
        before = server.complete().json()["system_fingerprint"]
        done = pool.submit(reload, server, "--model", "third")
        eventually(lambda: server.http.get("/ready").status_code == 503)
        assert running(server) == 3
        found = server.complete()
        assert found.status_code == 503 and found.headers["retry-after"]
        assert found.json()["error"]["code"] == "draining"
        assert "other weights" in found.json()["error"]["message"]
        for stream in streams:
            events = stream.result()
            assert events[-1] == "data: [DONE]"
            prints = [json.loads(e[6:])["system_fingerprint"] for e in events[:-1]]
            assert {*prints} == {before}
        done.result()
    assert server.http.get("/ready").status_code == 200
    assert names(server.complete())[0] == "fp_third" != before


def test_health_and_the_http_process_live_through_a_long_load(tmp_path):
    server = Server(tmp_path, "--step-timeout", "2.5", "--canary-interval", "3600")
    try:
        done = threading.Event()
        codes = []

        def watch():
            while not done.is_set():
                codes.append(httpx.get(server.url + "/health").status_code)
                time.sleep(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        reload(server, "--model", "slow")  # three seconds, more than a step timeout
        done.set()
        watcher.join()
        assert len(codes) > 3 and {*codes} == {200}
        assert names(server.complete())[0] == "fp_slow"
    finally:
        assert server.stop() == 0


def test_a_refused_reload_says_why_and_the_old_weights_serve(server):
    before = server.canary()
    text = reload(server, "--model", "bad", code=65)
    assert "hidden_size is 2, the model that serves has 1" in text
    assert server.canary() == before and server.http.get("/ready").status_code == 200


@pytest.mark.parametrize(("model", "code"), [("second", 0), ("bad", 65)])
def test_its_result_comes_once_requests_are_taken_again(server, model, code):
    """An HTTP process that is held up would still refuse: until it goes on nobody is told."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        server.child.suspend()
        done = pool.submit(reload, server, "--model", model, code=code)
        with pytest.raises(concurrent.futures.TimeoutError):
            done.result(1.0)
        server.child.resume()
        done.result()
        assert server.http.get("/ready").status_code == 200 == server.complete().status_code


def test_impatience_gives_the_reload_up_and_harms_nobody(server):
    before = names(server.complete(seed=1))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = in_background(pool, server, 1, cache_salt="slow=0.1", max_tokens=50)
        text = reload(server, "--model", "fourth", "--patience", "0.3", code=75)
        assert "requests still ran after 0.3 s" in text
        assert streams[0].result()[-1] == "data: [DONE]"
    assert names(server.complete(seed=1)) == before


def test_requests_sent_all_through_reloads_name_the_weights_that_answered(server):
    """The digest in each answer is one of the two models', and goes with its fingerprint."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0, "seed": 7}
    expected = {}
    for model in ("one", "two"):
        reload(server, "--model", model)
        name, digest = names(httpx.post(server.url + PATH, json=body))
        expected[name] = digest
    assert len({*expected.values()}) == 2
    stop = threading.Event()
    seen, statuses = [], []

    def ask():
        while not stop.is_set():
            found = httpx.post(server.url + PATH, json=body)
            statuses.append(found.status_code)
            if found.status_code == 200:
                seen.append(names(found))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for model in ("one", "two", "one"):
        reload(server, "--model", model)
        count = len(seen)
        eventually(lambda count=count: len(seen) > count + 3)
    stop.set()
    for thread in threads:
        thread.join()
    assert {*statuses} <= {200, 503} and len(seen) > 9
    assert {name for name, _ in seen} == {"fp_one", "fp_two"}
    assert all(expected[name] == digest for name, digest in seen)


def test_an_answer_goes_with_the_facts_of_the_moment_it_was_accepted():
    """Checked before a reload, accepted after it: the new weights answer, and are named."""

    async def submitted():
        status = Status("accepting", 0, 0, {})
        client = EngineClient("ipc:///nonexistent/s", bytes(32), Metrics("m", lambda: status), 8)
        starts = [
            EngineFacts(name, "c0" * 32, name * 32, 9, 9, (), 1, "", "float32")
            for name in ("d1", "d2")
        ]
        request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(seed=1))
        try:
            client._take(starts[0])
            client.say_serving()
            handle = client.submit((request,), "g", None)
            client._take(starts[1])
            assert handle.facts is None
            client._take(Accepted("g", 1))
            assert await handle.accepted == 1 and handle.facts is starts[1]
        finally:
            client.shut()

    asyncio.run(submitted())


def test_what_is_no_request_is_cleared_away(server):
    for content in ("{", '{"id": 1}', '{"id":"x","model":3,"patience":1}', '{"id":[],"x":1}'):
        (server.run / "reload.json").write_text(content)
        eventually(lambda: not (server.run / "reload.json").exists())
    assert server.complete().status_code == 200
    reload(server, "--model", "second")


def test_two_reloads_at_once_are_one_after_the_other_or_refused(server):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(reload_request.reload, server.run, "slow", 60.0)
        eventually(lambda: (server.run / "reload.json").exists())
        assert "another reload" in reload(server, "--model", "second", code=71)
        assert first.result().exit == 0


def test_a_server_that_is_not_trusted_takes_no_other_weights(tmp_path):
    server = Server(tmp_path, "--canary-interval", "0.2", drift_after=1)
    try:
        eventually(lambda: server.http.get("/ready").status_code == 503)
        assert "the server is untrusted" in reload(server, "--model", "second", code=75)
        assert server.http.get("/ready").status_code == 503
    finally:
        assert server.stop() == 0


def test_the_canary_learns_the_new_weights(tmp_path):
    """A reference that was kept would no longer be met, and close the server."""
    server = Server(tmp_path, "--canary-interval", "0.2")
    try:
        reload(server, "--model", "second")
        time.sleep(0.7)
        assert server.http.get("/ready").status_code == 200
        assert server.metric("tpdet_canary_mismatch_total") == 0
    finally:
        assert server.stop() == 0


def test_a_server_that_never_was_cannot_be_asked(tmp_path):
    nobody = SimpleNamespace(run=tmp_path)
    assert "no server of this host runs" in reload(nobody, code=66)
    nobody.run = tmp_path / "none"
    assert "not a run directory" in reload(nobody, code=2)
    nobody.run = tmp_path
    assert "out of range" in reload(nobody, "--patience", "-1", code=2)


def test_damaged_page_tables_close_the_server_and_its_log_says_how(tmp_path):
    server = Server(tmp_path, "--step-timeout", "2.5", damaged_after=2)
    try:
        assert server.complete().status_code == 200
        eventually(lambda: server.http.get("/ready").status_code == 503)
        found = server.complete()
        assert found.status_code == 503 and found.headers["retry-after"]
        assert "page tables are damaged" in found.json()["error"]["message"]
        assert server.http.get("/health").status_code == 200
        assert "page 7 is held by 0x1; the version table has 0x2" in server.log.read_text()
    finally:
        assert server.stop() == 0


def test_whole_page_tables_leave_it_open(tmp_path):
    server = Server(tmp_path, "--step-timeout", "2.5")
    try:
        time.sleep(1.0)
        assert server.http.get("/ready").status_code == 200
    finally:
        assert server.stop() == 0
