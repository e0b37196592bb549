"""Receipts over HTTP: durable before the end is sent, whatever end that is, and their owner's."""

import asyncio
import http.client
import itertools
import json
import os
import random
import resource
import signal
import socket
import statistics
import threading
import time
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import psutil
import pytest

from tests.lib.receipts import Audited, ended_answer, new_audited
from tests.lib.server.harness import MODEL, Server, eventually, refused
from tests.server.streams import PATH, decided
from tpdet.audit.receipts.bundle import Bundle, decode_bundle
from tpdet.audit.receipts.directory import AuditDirectory, unverified_statement
from tpdet.audit.receipts.verify import check_bundle, check_directory
from tpdet.requests.body.problems import ApiError
from tpdet.server.front.receipts import Receipts
from tpdet.server.front.tally import SharedTally
from tpdet.server.wire.process_config import AuditConfig

pytestmark = pytest.mark.long

KEYS = ("first-key", "second-key")


class Serving:
    """A server of two HTTP processes, with receipts, cached answers, two keys, a control door."""

    def __init__(self, folder, *flags: str) -> None:
        self.audited = new_audited(folder)
        keys = folder / "api-keys"
        keys.write_text("\n".join(KEYS))
        keys.chmod(0o600)
        flags = *flags, "--api-key-file", str(keys), "--admin-listen", "127.0.0.1:0"
        flags = *flags, "--answer-cache", str(folder / "answers"), "--http-processes", "2"
        self.server = Server(folder, *flags_of(self.audited), *flags)
        self.http = self.server.http

    def ask(self, key: str = KEYS[0], path: str = PATH, **fields) -> httpx.Response:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4} | fields
        return self.http.post(path, json=body, headers=bearer(key))

    def receipt(self, receipt_id: str, key: str = KEYS[0]) -> httpx.Response:
        return self.http.get(f"/v1/receipts/{receipt_id}", headers=bearer(key))

    def bundle(self, receipt_id: str) -> Bundle:
        """The receipt, once it is there, verified."""
        eventually(lambda: self.receipt(receipt_id).status_code == 200)
        bundle = decode_bundle(self.receipt(receipt_id).text, "it")
        check_bundle(bundle, self.audited.trusted)
        return bundle


def flags_of(audited: Audited) -> tuple[str, ...]:
    return "--audit-dir", str(audited.path), "--audit-key", str(audited.key)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def predicate_of(bundle: Bundle) -> dict:
    return json.loads(b64decode(json.loads(bundle.leaf)["payload"]))["predicate"]


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    found = Serving(tmp_path_factory.mktemp("s"))
    yield found
    assert found.server.stop() == 0, found.server.log.read_text()
    check_directory(found.audited.path, found.audited.trusted)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_a_receipt_that_holds(serving, stream):
    answer = serving.ask(stream=stream, n=2, seed=5)
    bundle = serving.bundle(answer.headers["tpdet-receipt"])
    text = answer.text.split("data: ")[-2] if stream else answer.text
    own = json.loads(text)["tpdet"]
    assert bundle.content.replay_digest == own["replay_digest"]
    assert bundle.content.request_digest == own["request_digest"]
    assert bundle.content.answers[0].prompt_token_ids == tuple(b"hello")
    predicate = predicate_of(bundle)
    assert predicate["outcome"] == "completed" and predicate["tokens"] == [4, 4]


def test_a_cached_answer_has_a_receipt_of_its_own(serving):
    first, second = (serving.ask(prompt="twice", seed=6) for _ in range(2))
    assert first.json()["choices"] == second.json()["choices"]
    bundles = [serving.bundle(answer.headers["tpdet-receipt"]) for answer in (first, second)]
    assert [predicate_of(bundle)["facts"]["cached"] for bundle in bundles] == [False, True]
    assert bundles[0].content.replay_digest == bundles[1].content.replay_digest
    assert bundles[0].content.salt != bundles[1].content.salt


def test_a_receipt_is_its_owners(serving):
    answer = serving.ask()
    name = answer.headers["tpdet-receipt"]
    assert serving.receipt(name).status_code == 200
    for error in (
        refused(serving.receipt(name, KEYS[1]), 404),
        refused(serving.receipt("0" * 32), 404),
        refused(serving.receipt("..%2f..%2fkeys.json"), 404),
    ):
        assert error["code"] == "not_found"


def test_a_reader_who_left_has_a_receipt_of_what_was_sent(serving):
    body = json.dumps({
        "model": MODEL, "prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True,
        "cache_salt": "slow=0.02",
    })  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", serving.server.port, timeout=30)
    headers = {"content-type": "application/json"} | bearer(KEYS[0])
    connection.request("POST", PATH, body, headers)
    answer = connection.getresponse()
    for _ in range(8):
        answer.readline()
    answer.close()
    connection.close()
    bundle = serving.bundle(answer.headers["tpdet-receipt"])
    predicate, content = predicate_of(bundle), bundle.content
    assert (predicate["outcome"], predicate["finish_reasons"]) == ("client_gone", [None])
    assert 4 <= predicate["tokens"][0] < 200 and content.replay_digest is None
    assert len(content.answers[0].outputs[0].token_ids) == predicate["tokens"][0]


def test_an_answer_that_the_operator_ended_has_a_receipt_of_all_of_it(serving):
    fields = {"max_tokens": 200, "ignore_eos": True, "cache_salt": "slow=0.02", "stream": True}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(serving.ask, **fields)
        eventually(lambda: serving.server.metric("tpdet_requests_running") == 1)
        url = serving.server.ready["admin_url"] + "/abort_requests"
        assert httpx.post(url, json={}).status_code == 200
    name = answer.result().headers["tpdet-receipt"]
    predicate = predicate_of(serving.bundle(name))
    assert (predicate["outcome"], predicate["finish_reasons"]) == ("aborted", ["abort"])
    assert answer.result().text.count('"text":"') >= predicate["tokens"][0] < 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_failed_has_a_receipt_with_the_reason(serving, stream):
    answer = serving.ask(cache_salt="nan=2", stream=stream)
    assert answer.status_code == (200 if stream else 500) and "numerical_error" in answer.text
    predicate = predicate_of(serving.bundle(answer.headers["tpdet-receipt"]))
    assert (predicate["outcome"], predicate["reason"]) == ("failed", "numerical_error")
    assert predicate["tokens"] == [2 if stream else 0]


def test_an_answer_of_several_weights_lists_their_spans(serving):
    answer = serving.ask(cache_salt="update=2", n=2)
    bundle = serving.bundle(answer.headers["tpdet-receipt"])
    spans = predicate_of(bundle)["spans"]
    assert [(s["choice"], s["start"], s["end"]) for s in spans][:2] == [(0, 0, 2), (0, 2, 4)]
    assert spans[0]["weights"] != spans[1]["weights"]
    assert bundle.content.replay_digest is None


def test_what_was_refused_has_no_receipt(serving):
    before = serving.server.http.get("/metrics").text.count("tpdet_receipts_total")
    assert before == 3  # help, type, value
    assert "tpdet-receipt" not in serving.ask(max_tokens=-1).headers
    assert "tpdet-receipt" not in serving.http.get("/health").headers


def by_both(serving: Serving, **fields) -> list[httpx.Response]:
    """Answers on new connections, until each of the two HTTP processes has given one."""
    answers: list[httpx.Response] = []
    while len({answer.headers["x-request-id"][-2:] for answer in answers}) < 2:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 2} | fields
        url = serving.server.url + PATH
        answers.append(httpx.post(url, json=body, headers=bearer(KEYS[0]), timeout=30))
    return answers


def test_a_full_disk_is_an_error_of_every_process(serving):
    """The files of the one that writes may grow no more, as where no room is left."""
    server, before = serving.server, serving.server.metric("tpdet_receipts_failed_total")
    lock = str(serving.audited.path / "log" / "lock")
    (writer,) = (one for one in server.children if lock in {file.path for file in one.open_files()})
    _, hard = writer.rlimit(resource.RLIMIT_FSIZE)
    writer.rlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        refusals, stream = by_both(serving), serving.ask(stream=True)
    finally:
        writer.rlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert {refused(one, 503)["code"] for one in refusals} == {"audit_unavailable"}
    assert "audit_unavailable" in stream.text and "[DONE]" not in stream.text
    assert '"finish_reason":"length"' not in stream.text
    assert server.metric("tpdet_receipts_failed_total") == before + len(refusals) + 1
    for answer in by_both(serving):
        assert serving.bundle(answer.headers["tpdet-receipt"])


def test_best_effort_counts_what_it_loses(tmp_path):
    audited, tally = new_audited(tmp_path), SharedTally.alone()
    receipts = Receipts(AuditConfig(str(audited.path), str(audited.key), False), None, tally)
    too_large = ended_answer(1, reason="x" * 70000)
    assert not asyncio.run(receipts.write(too_large))
    assert asyncio.run(receipts.write(ended_answer(2)))
    receipts.close()
    assert (tally.total("receipts_failed"), tally.total("receipts")) == (1, 1)
    assert check_directory(audited.path, audited.trusted).checkpoint.size == 1


def test_a_process_of_several_has_its_receipts_written_by_the_first(tmp_path):
    audited, here, there = new_audited(tmp_path), *socket.socketpair()
    config = AuditConfig(str(audited.path), str(audited.key), True)
    first, second = (
        Receipts(msgspec.structs.replace(config, **ends), None, SharedTally.alone())
        for ends in ({"others": (here.detach(),)}, {"writer": there.detach()})
    )
    assert asyncio.run(second.write(ended_answer(1)))
    assert asyncio.run(first.write(ended_answer(2)))
    with pytest.raises(ApiError) as too_large:
        asyncio.run(second.write(ended_answer(3, reason="x" * 70000)))
    assert too_large.value.code == "audit_unavailable"
    with pytest.raises(ApiError):  # an id that is there: what the writer refuses comes back
        asyncio.run(second.write(ended_answer(2)))
    assert second.bundle(f"{2:032x}", "") and first.bundle(f"{1:032x}", "")
    closing = threading.Thread(target=first.close)
    closing.start()
    assert asyncio.run(second.write(ended_answer(4)))  # the first waits for those that still write
    second.close()
    closing.join()
    assert check_directory(audited.path, audited.trusted).checkpoint.size == 3


def test_a_process_whose_writer_is_gone_gives_no_answer(tmp_path):
    audited, here, there = new_audited(tmp_path), *socket.socketpair()
    config = AuditConfig(str(audited.path), str(audited.key), True, there.detach())
    receipts = Receipts(config, None, SharedTally.alone())
    threading.Thread(target=lambda: here.recv(1) and here.close()).start()
    with pytest.raises(ApiError) as gone:
        asyncio.run(receipts.write(ended_answer(1)))
    assert gone.value.code == "audit_unavailable"
    receipts.close()


@pytest.mark.slow
def test_a_directory_of_another_server_is_refused_with_74(serving, tmp_path):
    other = Server(tmp_path, *flags_of(serving.audited), wait=False)
    assert other.process.wait(60) == 74, other.log.read_text()
    assert decided(other)["code"] == "audit_unavailable"
    assert serving.ask().status_code == 200


class Load:
    """Threads that ask until the server is gone; `ended` are receipts of whole answers."""

    def __init__(self, port: int, seed: int, threads: int = 8) -> None:
        self.ended: list[str] = []
        self._port = port
        self._threads = [
            threading.Thread(target=self._ask_on, args=(random.Random(f"{seed} {i}"),))
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _ask_on(self, draw: random.Random) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            while True:
                body = {"model": MODEL, "prompt": "x", "max_tokens": draw.randint(1, 6),
                        "stream": draw.random() < 0.5}  # fmt: skip
                headers = {"content-type": "application/json"}
                connection.request("POST", PATH, json.dumps(body), headers)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status == 200 and (not body["stream"] or text.endswith(b"[DONE]\n\n")):
                    self.ended.append(answer.headers["tpdet-receipt"])
        except (OSError, http.client.HTTPException):
            pass

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def logged(audited: Audited) -> set[str]:
    """The ids of all receipts in the log."""
    with AuditDirectory(audited.path).reading(audited.trusted) as (log, _):
        leaves = enumerate(log.leaves())
        return {unverified_statement(leaf, index).predicate.id for index, leaf in leaves}


def kill_under_load(folder, times: int, seed: int) -> int:
    """Kill a server's processes at random moments; the number of answers that came whole.

    It has 1, 2 and 3 HTTP processes in turn.
    """
    audited, draw, whole = new_audited(folder), random.Random(seed), 0
    for number in range(times):
        (folder / str(number)).mkdir()
        processes = str(1 + number % 3)
        server = Server(folder / str(number), *flags_of(audited), "--http-processes", processes)
        load = Load(server.port, number)
        target = draw.randint(0, 60)
        eventually(lambda load=load, target=target: len(load.ended) >= target, 60)
        victims = [psutil.Process(server.process.pid), *server.children]
        draw.shuffle(victims)
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        server.process.wait()
        load.join()
        check_directory(audited.path, audited.trusted)
        assert not {*load.ended} - logged(audited)
        whole += len(load.ended)
    audited.write([])  # another start still opens it
    return whole


def test_a_killed_server_owes_no_receipt(tmp_path):
    assert kill_under_load(tmp_path, 2, 7) > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_server_killed_200_times_owes_no_receipt(tmp_path):
    answers = 0
    for number in range(10):  # a log for 20 kills each: every one is verified whole each time
        folder = tmp_path / str(number)
        folder.mkdir()
        answers += kill_under_load(folder, 20, number)
    print(f"{answers} answers came whole, 200 kills, none lacks its receipt")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_a_receipt_costs(tmp_path):
    """Prints it: CPU time of the HTTP process, and how much later an answer ends."""
    rounds, answers = 5, 256
    servers = {}
    for name in ("without", "with"):
        (tmp_path / name).mkdir()
        flags = flags_of(new_audited(tmp_path)) if name == "with" else ()
        servers[name] = Server(tmp_path / name, *flags)
    costs: dict[str, list[tuple[float, ...]]] = {name: [] for name in servers}
    for _, (name, server) in itertools.product(range(rounds), servers.items()):
        before = server.child.cpu_times()
        alone = statistics.median(_seconds(server) for _ in range(answers))
        between = time.perf_counter()
        with ThreadPoolExecutor(64) as pool:
            together = sorted(pool.map(lambda _, at=server: _seconds(at), range(answers)))
        ended, after = time.perf_counter(), server.child.cpu_times()
        spent = sum(after[:2]) - sum(before[:2])
        figures = spent / answers / 2, alone, answers / (ended - between), together[-3]
        costs[name].append(figures)
    for name, rows in costs.items():
        cpu, alone, rate, p99 = map(statistics.median, zip(*rows, strict=True))
        print(
            f"\n{name}: {1e3 * cpu:.2f} ms of CPU an answer, {1e3 * alone:.2f} ms alone, of 64 at "
            f"a time {rate:.0f} answers/s and P99 {1e3 * p99:.1f} ms"
        )
    assert [server.stop() for server in servers.values()] == [0, 0]


def _seconds(server: Server) -> float:
    """The time of one answer of 8 tokens, on a connection of its own."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 8, "stream": True})
    connection.request("POST", PATH, body, {"content-type": "application/json"})
    assert connection.getresponse().read().endswith(b"[DONE]\n\n")
    connection.close()
    return time.perf_counter() - begun
