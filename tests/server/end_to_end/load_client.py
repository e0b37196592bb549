"""A light client for load: raw HTTP over asyncio, a connection each, answers by their bits."""

import asyncio
import json
import time
from dataclasses import dataclass, field

import psutil

PATH = "/v1/completions"
QUESTIONS = (
    {"prompt": "The for statement", "temperature": 0, "seed": 2, "max_tokens": 14, "logprobs": 2},
    {"prompt": "A list is", "temperature": 0.9, "top_p": 0.9, "seed": 3, "max_tokens": 10},
    {"prompt": "Import", "temperature": 1.0, "seed": 4, "max_tokens": 6, "n": 2},
    {"prompt": list(range(40, 330)), "temperature": 0.7, "top_k": 20, "seed": 5, "max_tokens": 6},
    {"prompt": list(range(50, 340)), "temperature": 0, "seed": 6, "max_tokens": 9},
)


@dataclass
class Reply:
    """What came back, and how many seconds after the request was sent."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def code(self) -> str:
        """The error's code, empty for an answer."""
        return json.loads(self.body).get("error", {}).get("code", "")

    @property
    def bits(self) -> str:
        """Everything of an answer but its id and time."""
        found = json.loads(self.body)
        return json.dumps([found["choices"], found["system_fingerprint"], found["tpdet"]])


def post_bytes(number: int, **more) -> bytes:
    """A request for one of QUESTIONS."""
    fields = {"model": "tiny", "return_token_ids": True} | QUESTIONS[number] | more
    body = json.dumps(fields).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def send(port: int, data: bytes) -> Reply:
    """Send a request and read all of its answer, which is not chunked."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        seconds = time.monotonic() - began
    finally:
        writer.close()
    lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    return Reply(int(lines[0].split()[1]), headers, body, seconds)


async def ask(port: int, number: int) -> Reply:
    """One of QUESTIONS."""
    return await send(port, post_bytes(number))


async def leave(port: int, number: int, after: int) -> None:
    """Ask for a stream, read `after` bytes of it and go away."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post_bytes(number, stream=True))
        await reader.read(after)
    finally:
        writer.transport.abort()


async def get(port: int, path: str) -> Reply:
    """A GET."""
    data = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    return await send(port, data)


async def metric(port: int, name: str) -> float:
    """The value of a metric, its labels as they are printed."""
    text = (await get(port, "/metrics")).body.decode()
    return float(
        next(line for line in text.splitlines() if line.startswith(name + " ")).split()[-1]
    )


async def golden(port: int) -> list[str]:
    """The answers to QUESTIONS, each alone."""
    replies = [await ask(port, number) for number in range(len(QUESTIONS))]
    assert [reply.status for reply in replies] == [200] * len(QUESTIONS), replies
    return [reply.bits for reply in replies]


async def settle(port: int, pages: int, seconds: float = 10.0) -> None:
    """Wait until nobody runs and every page is free or cached. AssertionError if it never is."""
    deadline = time.monotonic() + seconds
    while True:
        used = await metric(port, 'tpdet_kv_pages{state="used"}')
        rest = [await metric(port, f'tpdet_kv_pages{{state="{s}"}}') for s in ("cached", "free")]
        running = await metric(port, "tpdet_requests_running")
        if used == running == 0 and sum(rest) == pages:
            return
        assert time.monotonic() < deadline, (used, rest, running)
        await asyncio.sleep(0.1)


@dataclass
class Footprint:
    """What the server's processes hold: bytes of memory of each, and open files of all."""

    memory: list[int]
    files: int

    @classmethod
    def of(cls, processes: list[psutil.Process]) -> "Footprint":
        """Now."""
        return cls(
            [process.memory_info().rss for process in processes],
            sum(process.num_fds() for process in processes),
        )


@dataclass
class HealthWatch:
    """Asks `/health` all the while; the seconds of each answer."""

    port: int
    seconds: list[float] = field(default_factory=list)

    async def __aenter__(self) -> "HealthWatch":
        self._task = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _repeat(self) -> None:
        while True:
            reply = await get(self.port, "/health")
            assert reply.status == 200
            self.seconds.append(reply.seconds)
            await asyncio.sleep(0.02)
