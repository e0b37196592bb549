"""The room of batches: nobody who waits is passed, and half of everything is left to others."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.server.batches.place import Client
from tpdet.requests.body import limits
from tpdet.requests.request import Request, SamplingParams
from tpdet.server.batches.room import BatchRoom, Share
from tpdet.server.front.middleware import ClientGone


def call(prompt=10, tokens=5, choices=1, prompts=1):
    params = SamplingParams(n=choices, max_tokens=tokens)
    request = Request(
        request_id="r", prompt_token_ids=tuple(range(prompt)), params=params, eos_token_ids=()
    )
    return SimpleNamespace(requests=(request,) * prompts, choices=choices)


def test_a_share_is_what_a_call_takes_at_its_end():
    assert Share.of(call(prompt=250, tokens=6, choices=3, prompts=2)) == (6, 6, 500)
    assert Share.of(call(prompt=250, tokens=7, choices=3, prompts=2)) == (6, 12, 500)


async def entered(room, *calls):
    """How many of the calls are let in together, in their order; then all leave."""
    leave, inside = asyncio.Event(), []

    async def one(asked):
        async with room.place(asked, asyncio.get_running_loop().create_future()):
            inside.append(asked)
            await leave.wait()

    tasks = [asyncio.create_task(one(asked)) for asked in calls]
    for _ in range(30):  # turns of the loop; none who may enter waits for a timer
        await asyncio.sleep(0)
    count = len(inside)
    assert inside == [*calls[:count]]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return count


def test_half_of_seats_and_pages_is_left_to_others(monkeypatch):
    async def counts():
        room = BatchRoom(Client(), 8)  # and 8 pages of 256 tokens
        assert room.most == 4
        assert await entered(room, *[call() for _ in range(6)]) == 4
        assert await entered(room, call(choices=2), call(choices=2), call()) == 2
        assert await entered(room, call(choices=3), call(choices=2), call()) == 1  # in their order
        assert await entered(room, call(prompt=600, tokens=100), call(), call()) == 2
        assert await entered(room, call(choices=100), call()) == 1  # too large for half: alone
        monkeypatch.setattr(limits, "MAX_BATCH_PROMPT_TOKENS", 25)
        assert await entered(room, *[call() for _ in range(4)]) == 2
        assert await entered(room, call()) == 1  # all places were given back

    asyncio.run(counts())


def test_nobody_who_waits_is_passed():
    async def counts():
        client = Client()
        room = BatchRoom(client, 8)
        client.status.waiting = 1
        assert await entered(room, call()) == 0
        client.status.waiting = 0
        client.metrics.tally.total = lambda name: 1.0 if name == "pending" else 0.0
        assert await entered(room, call()) == 0
        client.metrics.tally.total = lambda name: 0.0
        client.state = "paused"
        assert await entered(room, call()) == 0
        client.state = "accepting"
        assert await entered(room, call()) == 1

    asyncio.run(counts())


def test_who_is_gone_waits_no_longer():
    async def wait():
        client = Client()
        client.status.waiting = 1
        gone = asyncio.get_running_loop().create_future()
        gone.set_result(None)
        async with BatchRoom(client, 8).place(call(), gone):
            pass

    with pytest.raises(ClientGone):
        asyncio.run(wait())
