"""Control routes against servers on a FakeEngine: pauses, aborts, names of weights, in answers."""

import concurrent.futures
import json
import signal
import time

import httpx
import pytest

from tests.lib.server.harness import MODEL, Server, eventually, refused
from tests.lib.some_slow import some_slow
from tests.server.leader.test_reload import reload
from tests.server.streams import SLOW, decided, in_background, running

pytestmark = pytest.mark.long
ADMIN = ("--admin-listen", "127.0.0.1:0", "--canary-interval", "3600")
PATH = "/v1/completions"


class ControlledServer(Server):
    """A server with an admin listener; `admin` speaks to that."""

    def __init__(self, folder, *flags, **options):
        super().__init__(folder, *ADMIN, *flags, **options)
        self.admin = httpx.Client(base_url=self.ready["admin_url"], timeout=30)

    def tell(self, path, **fields):
        answer = self.admin.post(path, json=fields) if fields else self.admin.post(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def paused(self):
        return self.admin.get("/is_paused").json()["is_paused"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One for all tests, each of which leaves it serving."""
    found = ControlledServer(tmp_path_factory.mktemp("server"))
    yield found
    assert found.stop() == 0, found.log.read_text()


@pytest.fixture
def pool(server):
    with concurrent.futures.ThreadPoolExecutor(8) as made:
        yield made
        server.tell("/resume")
        server.tell("/abort_requests")


def events(stream):
    assert stream[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in stream[:-1]]


def ending(stream):
    return events(stream)[-1]["choices"][0]["finish_reason"]


def test_abort_ends_running_requests_and_refuses_new_ones_until_resumed(server, pool):
    streams = in_background(pool, server, 2, **SLOW)
    whole = pool.submit(server.complete, n=2, **SLOW)
    eventually(lambda: running(server) == 3)
    began = time.monotonic()
    assert server.tell("/pause") == {"status": "paused"} and server.paused
    assert time.monotonic() - began < 5.0  # by themselves they end after 10
    for stream in streams:
        last = events(stream.result())[-1]
        assert last["choices"][0]["finish_reason"] == "abort"
        assert last["tpdet"]["replay_digest"] is None and last["tpdet"]["aborted"] is True
    body = whole.result().json()
    assert {choice["finish_reason"] for choice in body["choices"]} == {"abort"}
    assert body["usage"]["completion_tokens"] > 0 and body["tpdet"]["replay_digest"] is None
    error = refused(server.complete(), 503)
    assert error["code"] == "paused" and server.complete().headers["retry-after"] == "1"
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 503
    assert server.metric("tpdet_paused") == 1
    assert server.tell("/resume") == {"status": "resumed"} and not server.paused
    answer = server.complete()  # at once: nobody has to wait for the next report
    assert answer.status_code == 200 and answer.json()["tpdet"]["replay_digest"]
    assert server.http.get("/ready").status_code == 200


def test_wait_lets_running_requests_finish(server, pool):
    streams = in_background(pool, server, 2, cache_salt="slow=0.05", max_tokens=20)
    paused = pool.submit(server.tell, "/pause?mode=wait")
    eventually(lambda: server.complete().status_code == 503)
    assert not paused.done() and running(server) == 2 and server.paused
    assert paused.result() == {"status": "paused"}
    assert running(server) == 0
    assert {ending(stream.result()) for stream in streams} <= {"stop", "length"}


def test_a_wait_that_is_resumed_meanwhile_says_so(server, pool):
    (stream,) = in_background(pool, server, 1, cache_salt="slow=0.05", max_tokens=30)
    paused = pool.submit(server.admin.post, "/pause?mode=wait")
    eventually(lambda: server.complete().status_code == 503)
    server.tell("/resume")
    assert refused(paused.result(), 409)["code"] == "conflict"
    assert ending(stream.result()) in ("stop", "length")


def test_keep_freezes_running_requests_and_new_ones_wait(server, pool):
    reference = server.complete(seed=3, **SLOW | {"max_tokens": 12}).json()["choices"]
    kept = pool.submit(server.complete, seed=3, **SLOW | {"max_tokens": 12})
    eventually(lambda: running(server) == 1)
    assert refused(server.admin.post("/pause?keep_kv=true"), 400, "keep_kv") and not server.paused
    server.tell("/pause?mode=keep&keep_kv=true")
    steps = server.metric("tpdet_step_seconds_count")
    new = pool.submit(server.complete)
    time.sleep(0.4)
    assert not kept.done() and not new.done() and server.paused
    assert server.metric("tpdet_step_seconds_count") == steps
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 200  # requests are taken
    server.tell("/resume")
    assert kept.result().json()["choices"] == reference  # as if nothing had been
    assert new.result().status_code == 200


def test_sglang_names_the_modes_otherwise(server, pool):
    (stream,) = in_background(pool, server, 1, **SLOW)
    assert server.tell("/pause_generation", mode="retract")["status"] == "ok"
    assert server.paused and running(server) == 1
    flushed = {"success": True, "message": "Cache flushed. 1 running requests are computed again."}
    assert server.tell("/flush_cache") == flushed == server.admin.get("/flush_cache").json()
    assert server.tell("/continue_generation")["status"] == "ok" and not server.paused
    assert server.tell("/pause_generation", mode="in_place") and running(server) == 1
    server.tell("/continue_generation")
    server.tell("/pause_generation")
    assert ending(stream.result()) == "abort" and refused(server.complete(), 503)
    server.tell("/continue_generation")
    assert server.tell("/flush_cache")["message"] == "Cache flushed."
    assert server.complete().status_code == 200


def test_requests_are_ended_by_their_names(server, pool):
    streams = in_background(pool, server, 3, **SLOW)
    log = [line for line in server.log.read_text().splitlines() if "/pause" in line]
    assert log  # each call has its line
    named = pool.submit(httpx.post, server.url + PATH, json={"model": MODEL, "prompt": "x", **SLOW})
    eventually(lambda: running(server) == 4)
    nobody = {"request_ids": ["cmpl-nobody"]}
    assert server.tell("/abort_requests", **nobody) == {"status": "aborted", "aborted": 0}
    assert refused(server.admin.post("/abort_request", json={}), 400)["param"] == "rid"
    assert running(server) == 4
    load = lambda: server.admin.get("/v1/loads").json()["loads"][0]
    assert (load()["num_running_reqs"], load()["num_total_reqs"]) == (4, 4)
    assert server.tell("/abort_requests") == {"status": "aborted", "aborted": 4}
    eventually(lambda: load()["num_total_reqs"] == 0)  # what slime waits for
    assert {ending(stream.result()) for stream in streams} == {"abort"}
    assert named.result().json()["choices"][0]["finish_reason"] == "abort"
    assert (
        server.metric('vllm:request_success_total{finished_reason="abort",model_name="demo"}') > 0
    )


@pytest.mark.parametrize("name", ["answer", "request"])
def test_a_request_is_named_as_its_answer_or_its_http_request_is(server, pool, name):
    body = {"model": MODEL, "prompt": "x", "stream": True, **SLOW}
    with httpx.stream("POST", server.url + PATH, json=body, timeout=30) as found:
        lines = found.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        told = first["id"] if name == "answer" else found.headers["x-request-id"]
        if name == "answer":
            assert server.tell("/abort_requests", request_ids=[told])["aborted"] == 1
        else:
            server.tell("/abort_request", rid=told)
        assert '"finish_reason":"abort"' in "".join(lines)


def test_the_cache_is_emptied_and_says_whether(server, pool):
    assert server.tell("/reset_prefix_cache") == {"success": True}
    in_background(pool, server, 1, **SLOW)
    assert server.tell("/reset_prefix_cache") == {"success": True}
    kept = server.tell("/reset_prefix_cache?reset_running_requests=false&reset_external=true")
    assert kept == {"success": False}


def test_weights_have_a_name_that_answers_tell(server):
    info = server.admin.get("/weight_info").json()
    digest = info["weights"]
    named = server.tell("/update_weight_version", new_version="step-7")
    assert named == {"success": True, "new_version": "step-7"}
    assert server.admin.get("/get_weight_version").json()["weight_version"] == "step-7"
    plain = server.complete(seed=1).json()
    told = server.complete(seed=1, return_weight_versions=True, n=2).json()
    spans = [{"version": "step-7", "start": 0, "end": 4, "weights": digest}]
    assert [choice.pop("weight_versions") for choice in told["choices"]] == [spans, spans]
    assert told["choices"][0] == plain["choices"][0]
    assert plain["tpdet"]["replay_digest"] and "weight_versions" not in plain["choices"][0]
    long = server.admin.post("/update_weight_version", json={"new_version": "x" * 257})
    assert refused(long, 400, "new_version")
    sums = server.tell("/weight_checker")["checksums"]
    assert sums == {"model": digest, "lm_head.weight": "e2" * 32}
    assert server.tell("/weight_checker", action="compare", baseline=sums) == {
        "match": True,
        "mismatches": [],
    }
    other = server.tell("/weights_checker", action="compare", baseline=sums | {"model": "0" * 64})
    assert other == {"match": False, "mismatches": ["model"]}
    less = server.tell("/weight_checker", action="compare", baseline={"model": digest})
    assert less == {"match": False, "mismatches": ["lm_head.weight"]}
    assert refused(server.admin.post("/weight_checker", json={"action": "reset"}), 400, "action")


def test_an_answer_over_several_weights_says_which_tokens_are_whose(server):
    before = server.admin.get("/weight_info").json()
    body = {"cache_salt": "update=3", "max_tokens": 8, "ignore_eos": True, "seed": 2}
    answer = server.complete(**body, return_token_ids=True).json()
    after = server.admin.get("/weight_info").json()
    assert after["weights"] != before["weights"]
    expected = [
        {"version": before["weight_version"], "start": 0, "end": 3, "weights": before["weights"]},
        {"version": after["weight_version"], "start": 3, "end": 8, "weights": after["weights"]},
    ]
    assert answer["choices"][0]["weight_versions"] == expected
    assert answer["tpdet"]["replay_digest"] is None and answer["tpdet"]["mixed_weights"] is True
    assert answer["system_fingerprint"] is None and "contract" not in answer["tpdet"]
    # As a stream: each event names the weights of its own tokens, and cannot be resumed later.
    fields = {"model": MODEL, "prompt": "x", "stream": True} | body
    accept = {"accept": "text/event-stream"}
    stream = httpx.post(server.url + PATH, json=fields, headers=accept).text.split("\n\n")[:-1]
    parts = [event.split("\n", 1) for event in stream[:-1]]
    data = [json.loads(part.removeprefix("data: ")) for _, part in parts]
    first, second = (data[i]["system_fingerprint"] for i in (0, -1))
    assert first != second
    assert [one["system_fingerprint"] for one in data] == [first] * 3 + [second] * 5
    cursors = [line for line, _ in parts]
    assert all(len(line) > 10 for line in cursors[:3]) and {*cursors[3:]} == {"id:"}
    last = data[-1]
    assert [(s["start"], s["end"]) for s in last["choices"][0]["weight_versions"]] == [
        (0, 3),
        (3, 8),
    ]
    assert last["tpdet"]["replay_digest"] is None and last["tpdet"]["mixed_weights"] is True
    # What the client has was computed by weights that no longer serve: refused by name.
    old = cursors[1].removeprefix("id: ")
    again = httpx.post(server.url + PATH, json=fields, headers=accept | {"last-event-id": old})
    assert refused(again, 409)["code"] == "resume_mismatch"


def test_a_resumed_answer_is_refused_when_its_weights_change_before_it_is_compared(server):
    fields = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 8, "ignore_eos": True}
    fields |= {"seed": 2}
    accept = {"accept": "text/event-stream"}
    stream = httpx.post(server.url + PATH, json=fields, headers=accept).text.split("\n\n")
    cursor = stream[5].split("\n")[0].removeprefix("id: ")
    changed = fields | {"cache_salt": "update=2"}
    answer = httpx.post(server.url + PATH, json=changed, headers=accept | {"last-event-id": cursor})
    assert refused(answer, 409)["code"] == "resume_mismatch"


def test_a_reload_while_paused_loads_unless_requests_are_kept(server, pool):
    server.tell("/pause?mode=abort")
    assert "other loaded" in reload(server, "--model", "other")
    assert server.paused and refused(server.complete(), 503)["code"] == "paused"
    server.tell("/resume")
    assert server.complete().json()["system_fingerprint"] == "fp_other"
    in_background(pool, server, 1, **SLOW)
    server.tell("/pause?mode=keep")
    assert "keeps its requests: resume it first" in reload(server, code=75)
    assert running(server) == 1 and server.paused


@pytest.mark.parametrize("mode", some_slow({"keep"}, ["keep", "abort"]))
def test_a_paused_server_drains(tmp_path, mode):
    server = ControlledServer(tmp_path)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        kept = pool.submit(server.complete, cache_salt="slow=0.05", max_tokens=15)
        eventually(lambda: running(server) == 1)
        server.tell(f"/pause?mode={mode}")
        server.process.send_signal(signal.SIGTERM)
        reason = kept.result().json()["choices"][0]["finish_reason"]
        assert (reason == "abort") is (mode == "abort")
        assert server.stop() == 0, server.log.read_text()


def test_a_reload_heals_torn_weights_and_what_they_held_up_goes_on(server):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        held = pool.submit(server.complete, cache_salt="torn=2", max_tokens=6, ignore_eos=True)
        eventually(lambda: server.admin.get("/weight_info").json()["state"] == "torn")
        assert refused(server.complete(), 503)["code"] == "weights_incomplete"
        assert "healing loaded" in reload(server, "--model", "healing")
        (choice,) = held.result().json()["choices"]
    spans = [(span["start"], span["end"]) for span in choice["weight_versions"]]
    assert spans == [(0, 3), (3, 6)]
    assert server.complete().json()["system_fingerprint"] == "fp_healing"


def test_kept_requests_without_whole_weights_end_with_an_error_when_the_server_stops(tmp_path):
    server = ControlledServer(tmp_path)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        (stream,) = in_background(pool, server, 1, cache_salt="torn=2", max_tokens=9)
        eventually(lambda: server.admin.get("/weight_info").json()["state"] == "torn")
        server.tell("/pause?mode=keep")
        whole = pool.submit(server.complete)
        eventually(lambda: server.metric("tpdet_requests_waiting") == 1)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        error = json.loads(stream.result()[-1].removeprefix("data: "))["error"]
        assert error["code"] == "draining" and "its weights are incomplete" in error["message"]
        assert refused(whole.result(), 503) == error
        assert server.process.wait(30) == 143 and decided(server)["code"] == "drain_timeout"
        assert time.monotonic() - began < 20, "the drain's time is for what can end"


@pytest.mark.long
def test_any_http_process_controls_the_one_engine(tmp_path):
    server = ControlledServer(tmp_path, "--http-processes", "2")
    try:
        seen = set()
        for _ in range(200):
            told = httpx.post(server.ready["admin_url"] + "/pause?mode=wait", timeout=30)
            assert told.json() == {"status": "paused"}
            refused(httpx.post(server.url + PATH, json={"model": MODEL, "prompt": "x"}), 503)
            told = httpx.post(server.ready["admin_url"] + "/resume", timeout=30)
            # At once, whichever process is asked.
            assert httpx.get(server.url + "/ready").status_code == 200
            answer = httpx.post(server.url + PATH, json={"model": MODEL, "prompt": "x"})
            assert answer.status_code == 200, answer.text
            seen |= {(told.headers["x-request-id"][-2:], answer.headers["x-request-id"][-2:])}
            if len(seen) == 4:
                return
        raise AssertionError(f"only {seen} answered")
    finally:
        assert server.stop() == 0, server.log.read_text()
