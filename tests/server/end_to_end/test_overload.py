"""Four times what a real server can take: quick refusals, right answers, nothing left behind."""

import asyncio
import signal
import time

import pytest

from tests.lib.server.harness import MODEL, Server
from tests.server.end_to_end.load_client import (
    QUESTIONS,
    Footprint,
    HealthWatch,
    ask,
    golden,
    post_bytes,
    send,
    settle,
)
from tests.server.end_to_end.test_end_to_end import Served

pytestmark = pytest.mark.alone
PAGES, SEATS, QUEUE = 40, 4, 8
MEMORY_SLACK = 24 << 20


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory):
    flags = ("--max-num-seqs", str(SEATS), "--max-queue", str(QUEUE), "--kv-pages", str(PAGES))
    flags += ("--max-num-batched-tokens", "96", "--max-model-len", "512")
    found = Served(tiny_model("qwen3", kv_heads=2), tmp_path_factory.mktemp("overload"), 1, *flags)
    yield found
    assert found.end() == 0, found.log.read_text()


async def capacity(port: int, count: int) -> float:
    """Requests a second when no more are there than there are seats."""
    began = time.monotonic()
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            assert (await ask(port, number % len(QUESTIONS))).status == 200

    await asyncio.gather(*(worker() for _ in range(SEATS)))
    return count / (time.monotonic() - began)


async def flood(port: int, count: int, rate: float) -> list:
    """`count` requests at `rate` a second, whatever becomes of them."""
    began, tasks = time.monotonic(), []
    for number in range(count):
        await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        tasks.append(asyncio.create_task(ask(port, number % len(QUESTIONS))))
    return await asyncio.gather(*tasks)


def quick(seconds: list[float], limit: float) -> bool:
    """Whether all are within `limit` seconds, but for one in a hundred and one.

    Client, server and whatever else the machine runs share its cores: a process that is not
    scheduled for a while is late through no fault of the server. None is late by a second.
    """
    late = [value for value in seconds if value >= limit]
    return len(late) <= 1 + len(seconds) // 100 and max(seconds) < 1.0


def test_what_counts_as_quick():
    assert quick([0.1] * 97 + [0.3] * 3, 0.2) is False
    assert quick([0.1] * 98 + [0.3, 0.19], 0.2)
    assert quick([0.1] * 99 + [1.1], 0.2) is False


def test_a_full_queue_refuses_while_the_engine_hears_nobody(tmp_path):
    """What a step takes is no part of a refusal: here one takes until all refusals are out."""
    server = Server(tmp_path, "--max-queue", "3")
    before = server.canary()

    async def ask_all() -> list:
        data = post_bytes(0, model=MODEL, prompt="x")
        tasks = [asyncio.create_task(send(server.port, data)) for _ in range(30)]
        async with asyncio.timeout(10):
            while sum(task.done() for task in tasks) < 27:
                await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGCONT)
        return await asyncio.gather(*tasks)

    server.process.send_signal(signal.SIGSTOP)
    try:
        replies = asyncio.run(ask_all())
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert sorted(reply.status for reply in replies) == [200] * 3 + [503] * 27
    assert quick([reply.seconds for reply in replies if reply.status == 503], 0.2)
    assert server.canary() == before
    assert server.stop() == 0


@pytest.mark.parametrize("count", [120, pytest.param(1000, marks=pytest.mark.slow)])
def test_at_four_times_capacity(served, count):
    port = int(served.ready["url"].rsplit(":", 1)[1])

    async def overload():
        expected = await golden(port)
        rate = 4 * await capacity(port, 15)
        await flood(port, 40, rate)  # what is allocated once
        await settle(port, PAGES)
        before = Footprint.of(served.everyone)
        async with HealthWatch(port) as health:
            replies = await flood(port, count, rate)
        await settle(port, PAGES)
        after = Footprint.of(served.everyone)
        return expected, replies, health.seconds, before, after, await golden(port)

    expected, replies, health, before, after, again = asyncio.run(overload())
    refused = [reply for reply in replies if reply.status == 503]
    answered = [(i, reply) for i, reply in enumerate(replies) if reply.status == 200]
    assert len(refused) + len(answered) == count
    # Four times as many as it can serve: the queue takes some, most of the rest are refused.
    assert len(refused) > 0.4 * count and len(answered) > QUEUE
    assert {reply.code for reply in refused} == {"engine_overloaded"}
    assert all(int(reply.headers["retry-after"]) > 0 for reply in refused)
    waits = sorted(reply.seconds for reply in refused)
    assert quick(waits, 0.2), f"the slowest of {len(waits)} refusals: {waits[-20:]}"
    for index, reply in answered:
        assert reply.bits == expected[index % len(QUESTIONS)]
    assert again == expected
    assert len(health) > 5 and quick(health, 0.1), sorted(health)[-20:]
    assert after.files <= before.files
    for earlier, later in zip(before.memory, after.memory, strict=True):
        assert later - earlier < MEMORY_SLACK
