"""What becomes of a large body in its worker, and in the queue before the workers."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

from tests.lib.server.harness import MODEL, write_tokenizer
from tpdet.requests.body import limits
from tpdet.requests.body.json_body import parse_object
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.problems import ApiError
from tpdet.requests.body.work import prepare_call
from tpdet.requests.engine_facts import EngineFacts
from tpdet.server.body.job import Answered, Broken, Job, JobRefused, Prepared, Reply
from tpdet.server.body.worker import work
from tpdet.server.front import large_bodies
from tpdet.server.front.large_bodies import LargeBodies
from tpdet.server.front.middleware import ClientGone
from tpdet.text.tokenizer import Tokenizer, read_files

FACTS = EngineFacts("fp", "c0" * 32, "d1" * 32, 256, 512, (258,), 1, "fp2", "float32")
JOB = Job("completion", "r", MODEL, "salt", FACTS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("extra", [{}, {"logprobs": 3, "echo": True}, {"seed": 3, "n": 2}])
def test_a_call_made_elsewhere_is_the_one_made_here(tokenizer, extra):
    fields = {"model": MODEL, "prompt": ["hello", "wörld"], "stop": ["x"], "logit_bias": {"7": 1}}
    body = json.dumps(fields | {"max_tokens": 4} | extra).encode()
    here = prepare_call(
        "completion", Preparer(FACTS, MODEL, tokenizer, "salt"), parse_object(body), "r"
    )
    sent = msgspec.msgpack.encode(work(JOB, body, tokenizer))
    there = msgspec.msgpack.decode(sent, type=Reply)
    assert isinstance(there, Prepared)
    call = asyncio.run(there.outcome())
    assert msgspec.structs.replace(call.requests[0]) == here.requests[0]
    assert {**vars(call), "created": 0} == {**vars(here), "created": 0}


def run_pool(monkeypatch, do, act):
    """`act(pool)` on a pool whose workers do `do(job, body)`."""
    monkeypatch.setattr(large_bodies._Worker, "do", lambda self, job, body: do(body))

    async def run():
        return await act(LargeBodies(None))

    return asyncio.run(run())


def test_more_large_bodies_than_may_wait_are_refused_at_once(monkeypatch):
    reply = msgspec.msgpack.encode(Answered(b"done"))
    most = limits.MAX_WAITING_LARGE_BODIES + 2

    async def act(pool):
        loop = asyncio.get_running_loop()
        opened, gone = loop.create_future(), loop.create_future()
        act.opened = opened
        tasks = [asyncio.create_task(pool.work(JOB, b"x", gone)) for _ in range(most)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as refused:
            await asyncio.wait_for(pool.work(JOB, b"x", gone), 1)
        leaving = loop.create_future()
        tasks[-1].cancel()
        await asyncio.sleep(0.01)
        left = asyncio.create_task(pool.work(JOB, b"x", leaving))  # there is room for one
        await asyncio.sleep(0.01)
        leaving.set_result(None)
        with pytest.raises(ClientGone):
            await left
        opened.set_result(None)
        assert await asyncio.gather(*tasks[:-1]) == [b"done"] * (most - 1)
        assert await pool.work(JOB, b"x", gone) == b"done"
        return refused.value

    async def do(body):
        await asyncio.shield(act.opened)
        return reply

    error = run_pool(monkeypatch, do, act)
    assert (error.status, error.code) == (503, "engine_overloaded")
    assert ("retry-after", "1") in error.headers


def test_a_fault_of_ours_is_a_500_without_the_text(tokenizer, monkeypatch):
    words = ("what the cl", "ient wrote")

    def broken(*_):
        raise KeyError("".join(words))

    monkeypatch.setattr("tpdet.server.body.worker.work_on", broken)
    reply = work(JOB, b"{}", tokenizer)
    assert isinstance(reply, Broken) and "KeyError" in reply.trace
    assert "client wrote" not in reply.trace
    with pytest.raises(ApiError) as error:
        asyncio.run(reply.outcome())
    assert error.value.status == 500 and error.value.code == "internal_error"

    def greedy(*_):
        raise MemoryError

    monkeypatch.setattr("tpdet.server.body.worker.work_on", greedy)
    assert isinstance(work(JOB, b"{}", tokenizer), JobRefused)


def test_a_text_the_library_gives_up_on_is_refused(tokenizer, monkeypatch):
    """Ten million blanks end a regular expression's search; a Rust panic is no Exception."""
    panic = type("PanicException", (BaseException,), {})

    def encode(texts, add_special_tokens):
        raise panic("Onig: Regex search error: retry-limit-in-match over")

    monkeypatch.setattr(tokenizer, "_backend", SimpleNamespace(encode_batch_fast=encode))
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    reply = work(JOB, body, tokenizer)
    assert isinstance(reply, JobRefused) and reply.status == 400 and "retry-limit" in reply.message
    with pytest.raises(KeyboardInterrupt):  # negative control: nothing else is caught
        panic = KeyboardInterrupt
        work(JOB, body, tokenizer)


def test_a_worker_has_the_files_that_the_server_read(tmp_path):
    write_tokenizer(tmp_path)
    files = read_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Tokenizer.from_files(files).encode("hi") == [104, 105]
