"""Several HTTP processes behind one port: their sums, their bounds, and the loss of one."""

import asyncio
import http.client
import json
import re
from collections import Counter

import psutil
import pytest

from tests.lib.server.harness import MODEL, Server, eventually
from tests.server.streams import PATH, SLOW, decided, running
from tpdet.errors import UsageError
from tpdet.requests.body.limits import share_of
from tpdet.requests.body.problems import ApiError
from tpdet.server.front.engine_client import EngineClient, next_state
from tpdet.server.front.metrics import Metrics
from tpdet.server.front.tally import SharedTally, new_tallies
from tpdet.server.settings.settings import load_settings
from tpdet.server.wire.protocol import REFUSALS, Status, new_request_id, process_of

pytestmark = pytest.mark.long

TWO = ("--http-processes", "2")
ENOUGH = 200  # connections, of which each process gets some


def ask(server: Server, path: str = PATH, **fields) -> http.client.HTTPResponse:
    """An answer on a new connection; a GET without fields."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    if fields:
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 3} | fields)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
    else:
        connection.request("GET", path)
    return connection.getresponse()


def process(answer: http.client.HTTPResponse) -> int:
    return int(answer.headers["x-request-id"][-2:], 16)


def of_both(make) -> dict[int, list]:
    """Answers by the process that gave them, until both have given one."""
    found: dict[int, list] = {}
    for _ in range(ENOUGH):
        answer = make()
        found.setdefault(process(answer), []).append(answer)
        if len(found) == 2:
            return found
    raise AssertionError(f"only {found.keys()} answered {ENOUGH} connections")


def metric(text: str, name: str) -> float:
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


def test_answers_are_equal_and_metrics_are_the_sums_of_both(start_server):
    server = start_server(*TWO)
    answers = of_both(lambda: ask(server, seed=5, logprobs=1))
    bodies = [json.loads(one.read()) for found in answers.values() for one in found]
    assert len({json.dumps(body["choices"]) for body in bodies}) == 1
    refusals = of_both(lambda: ask(server, "/nothing"))
    refused = sum(map(len, refusals.values()))
    for pages in of_both(lambda: ask(server, "/metrics")).values():
        text = pages[0].read().decode()
        assert metric(text, 'tpdet_requests_total{outcome="completed"}') == len(bodies)
        assert metric(text, 'tpdet_rejected_total{code="not_found"}') == refused
        assert metric(text, "tpdet_generation_tokens_total") == 3 * len(bodies)
        assert metric(text, "tpdet_time_to_first_token_seconds_count") == len(bodies)
        # No step is counted by both, though both had tokens of some.
        steps = metric(text, "tpdet_step_seconds_count")
        assert 3 * len(bodies) <= steps < 6 * len(bodies)
    assert server.stop() == 0
    assert not any(child.is_running() for child in server.children)


def test_connections_are_shared_out_and_closed_ones_make_room(start_server):
    server = start_server(*TWO)
    rounds = []
    for _ in range(8):  # a process that gets no processor for some ms leaves its share to the other
        opened = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(40)]
        for connection in opened:
            connection.connect()
        for connection in opened:
            connection.request("GET", "/health")
        shares = Counter(process(connection.getresponse()) for connection in opened)
        for connection in opened:
            connection.close()
        rounds.append(min(shares[0], shares[1]))
        if sum(least >= 15 for least in rounds) == 2:
            break
    else:
        raise AssertionError(f"of 40 connections, the smaller shares were {rounds}")
    assert server.stop() == 0


@pytest.mark.parametrize("lost", [0, 1])
def test_either_process_killed_ends_every_stream_and_the_server_with_75(start_server, lost):
    server = start_server(*TWO)
    streams = of_both(lambda: ask(server, stream=True, **SLOW))
    eventually(lambda: running(server) == sum(map(len, streams.values())))
    server.children[lost].kill()
    assert server.process.wait(10) == 75 and decided(server)["exit"] == 75
    for answer in streams[1 - lost]:
        last = answer.read().decode().strip().rsplit("data: ", 1)[1]
        assert json.loads(last)["error"]["code"] == "engine_dead"
    for answer in streams[lost]:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
    eventually(lambda: not any(map(psutil.Process.is_running, server.children)))


@pytest.mark.slow
def test_the_second_process_stopped_is_75_after_the_step_timeout(start_server):
    server = start_server(*TWO, "--step-timeout", "2")
    server.children[1].suspend()
    assert server.process.wait(15) == 75
    eventually(lambda: not any(map(psutil.Process.is_running, server.children)))


def test_the_queue_holds_what_all_processes_sent():
    descriptor = new_tallies(2)
    mine, other = SharedTally(descriptor, 0), SharedTally(descriptor, 1)
    status = Status("accepting", 0, 3, {})
    metrics = Metrics("m", lambda: status, mine)

    async def sent():
        client = EngineClient("ipc:///nonexistent/s", bytes(32), metrics, 8)
        client.status = status
        client.say_serving()
        other.add("pending", 4)
        client.check_open()
        other.add("pending", 1)
        with pytest.raises(ApiError) as refused:
            client.check_open()
        assert refused.value.code == "engine_overloaded"
        client.shut()

    asyncio.run(sent())


def test_a_process_follows_the_engines_state_out_of_each_that_may_end():
    passing = ("accepting", "reloading", "paused", "incomplete", "unusable")
    for after in (*REFUSALS, "accepting"):
        for before in passing:
            assert next_state(before, after) == after
        for before in ("untrusted", "damaged"):
            assert next_state(before, after) == ("draining" if after == "draining" else before)
        for before in ("starting", "draining", "dead"):
            assert next_state(before, after) == before


def test_what_is_held_and_waits_is_shared_out():
    assert [share_of(128, n) for n in (1, 2, 8)] == [128, 64, 16]
    assert share_of(2, 8) == 1


def test_a_request_names_its_process():
    ids = [new_request_id(number) for number in range(8)]
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids) and len({*ids}) == 8
    assert [process_of(f"chatcmpl-{one}-12") for one in ids] == list(range(8))


@pytest.mark.parametrize("count", ["0", "9", "two"])
def test_a_count_out_of_range_is_refused_by_name(count):
    with pytest.raises(UsageError, match="http-processes"):
        load_settings(["m", "--http-processes", count], "t")
