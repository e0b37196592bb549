"""A storm on the HTTP process: large bodies and answers, streams, and clients that misbehave.

Equal storms have the same requests in the same order, whatever the machine's pace.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.lib.server.harness import MODEL, request_bytes

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KIND = "Content-Type: application/json"
WORDS = "some words of a large text, "


def post(path: str, fields: dict, length: int | None = None) -> bytes:
    """A request; `length` announces another body than it has."""
    body = json.dumps({"model": MODEL} | fields).encode()
    return request_bytes(path, body, KIND, f"Content-Length: {length or len(body)}")


async def whole(port: int, data: bytes) -> int:
    """Send a request and read all of its answer; the status."""
    return await part(port, data, -1)


async def part(port: int, data: bytes, most: int) -> int:
    """Send a request, read some of its answer (-1: all) and leave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
        status, left = 0, most
        while left and (chunk := await reader.read(1 << 16 if left < 0 else min(left, 1 << 16))):
            status = status or int((chunk.split(maxsplit=2) + [b"0"] * 2)[1])
            left -= len(chunk) if left > 0 else 0
        return status
    except ConnectionError:
        return 0
    finally:
        writer.transport.abort()


async def small(port: int, chance: random.Random) -> None:
    """A completion or a chat, whole or streamed."""
    fields = {"max_tokens": chance.randrange(1, 40), "n": chance.choice((1, 2)), "seed": 1}
    fields |= {"stream": chance.random() < 0.5, "ignore_eos": True}
    if chance.random() < 0.5:
        fields |= {"messages": [{"role": "user", "content": WORDS * chance.randrange(1, 60)}]}
        fields |= {"logprobs": True, "top_logprobs": 5}
        data = post(CHAT, fields)
    else:
        data = post(COMPLETIONS, fields | {"prompt": WORDS, "logprobs": chance.choice((None, 5))})
    assert await whole(port, data) == 200


async def large_body(port: int, chance: random.Random) -> None:
    """A text that another process works on: cut, refused, or only tokenised."""
    text = WORDS * chance.choice((700, 12_000, 40_000))
    path, fields = chance.choice(
        (
            (COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 8, "max_tokens": 2}),
            (COMPLETIONS, {"prompt": text}),
            ("/tokenize", {"prompt": text}),
        )
    )
    assert await whole(port, post(path, fields)) in (200, 400, 503)


async def large_answer(port: int, chance: random.Random) -> None:
    """Prompts with their log-probabilities, or many choices; some readers leave."""
    fields = chance.choice(
        (
            {"prompt": [[7] * 8000], "prompt_logprobs": 20, "max_tokens": 0},
            {"prompt": [9] * 8000, "echo": True, "logprobs": 20, "max_tokens": 0, "stream": True},
            {"prompt": "x", "n": 64, "logprobs": 10, "max_tokens": 40, "ignore_eos": True},
        )
    )
    data = post(COMPLETIONS, fields)
    if chance.random() < 0.3:
        await part(port, data, chance.choice((1, 100_000)))
    else:
        assert await whole(port, data) in (200, 503)


async def cancelled(port: int, chance: random.Random) -> None:
    """A stream whose reader leaves."""
    fields = {"prompt": "x", "stream": True, "max_tokens": 400, "ignore_eos": True, "n": 4}
    await part(port, post(COMPLETIONS, fields), chance.choice((1, 300, 5000)))


async def torn(port: int, chance: random.Random) -> None:
    """Part of a request, or none."""
    data = post(COMPLETIONS, {"prompt": WORDS * 200})
    data = chance.choice((data[: chance.randrange(1, len(data))], data[:200] + b"\0" * 50, b"\r\n"))
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await asyncio.sleep(0.01)
    writer.transport.abort()


async def unfinished(port: int, chance: random.Random) -> None:
    """A large body that lacks its end, for a while."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    size = 10 << 20
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(post(COMPLETIONS, {"prompt": "x"}, size)[:-1])
        for _ in range(9):
            writer.write(b"x" * (1 << 20))
            await asyncio.wait_for(writer.drain(), 10)
        await asyncio.sleep(chance.random())
    writer.transport.abort()


Kind = Callable[[int, random.Random], Awaitable[None]]
# How many of each kind are in a hundred requests.
SHARES: dict[Kind, int] = {
    small: 50, large_body: 6, large_answer: 10, cancelled: 15, torn: 13, unfinished: 6,
}  # fmt: skip
AT_ONCE = 12


async def storm(port: int, hundreds: int, seed: int = 1) -> Counter[str]:
    """Send `hundreds` of hundred requests, so many at once; how many there were of each kind."""
    chance = random.Random(seed)
    kinds = [kind for kind, share in SHARES.items() for _ in range(share * hundreds)]
    chance.shuffle(kinds)
    left = iter([(kind, random.Random(number)) for number, kind in enumerate(kinds)])

    async def worker() -> None:
        for kind, own_chance in left:
            await asyncio.wait_for(kind(port, own_chance), 120)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return Counter(kind.__name__ for kind in kinds)
