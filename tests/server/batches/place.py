"""Files and batches in this process: the routes behind the real middleware, without an engine."""

import asyncio
import json
from contextlib import asynccontextmanager
from hashlib import sha256
from types import SimpleNamespace

import httpx
import openai
from fastapi import FastAPI

from tpdet.requests.body.problems import ApiError
from tpdet.server.batches.room import BatchRoom
from tpdet.server.batches.routes import add_batch_routes
from tpdet.server.batches.runner import Batches
from tpdet.server.batches.store import BatchStore
from tpdet.server.front.app import ProblemResponse
from tpdet.server.front.door import Door
from tpdet.server.front.middleware import ClientGone, RequestMiddleware
from tpdet.server.settings.keys import KeyRing

KEYS = ("sk-one", "sk-two")
COMPLETIONS = "/v1/completions"


class FakeAnswers:
    """Answers a body with its prompt and seed; `refuse` has problems by prompt.

    While `open` is clear nobody is answered; `asked` has the prompts in the order they came.
    """

    def __init__(self):
        self.open, self.asked, self.running, self.most = asyncio.Event(), [], 0, 0
        self.open.set()
        self.refuse: dict[str, list[ApiError]] = {}

    async def __call__(self, exchange, route, owner, room):
        body = exchange.body
        self.asked.append(body["prompt"])
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            waiting = asyncio.ensure_future(self.open.wait())
            await asyncio.wait([waiting, exchange.gone], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if exchange.gone.done():
                raise ClientGone
            problems = self.refuse.get(body["prompt"])
            if problems:
                raise problems.pop()
            names = {"id": f"cmpl-{exchange.request_id}", "created": len(self.asked)}
            answer = {**names, "route": route, "owner": owner, "echo": body}
            return json.dumps(answer, separators=(",", ":")).encode()
        finally:
            self.running -= 1


class Client:
    """What a room asks of an engine's client."""

    def __init__(self):
        counters = {"pages_used": 0.0, "pages_free": 8.0}
        self.state, self.status = "accepting", SimpleNamespace(waiting=0, counters=counters)
        self.metrics = SimpleNamespace(tally=SimpleNamespace(total=lambda name: 0.0))


async def problem(request, error):
    return ProblemResponse(error)


@asynccontextmanager
async def serving(folder, answers=None, seats=16, most_bytes=1 << 20):
    """A server on a folder; `openai(n)` is an openai client with key n, `http` a bare one.

    `drain` is a function that ends it while it is still asked.
    """
    batches = Batches(BatchStore(folder), BatchRoom(Client(), seats), most_bytes)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    add_batch_routes(app, batches)
    app.add_exception_handler(ApiError, problem)
    door = Door(KeyRing(tuple(sha256(key.encode()).hexdigest() for key in KEYS)))
    middleware = RequestMiddleware(app, app.routes, door, 30.0, lambda code: None)
    answers = answers or FakeAnswers()
    ended = asyncio.Event()
    closing = asyncio.create_task(batches.close_when(ended.is_set))
    await batches.begin(answers)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(middleware),
        base_url="http://s",
        headers={"authorization": f"Bearer {KEYS[0]}"},
    ) as http:

        def client(number=0):
            url = "http://s/v1"
            return openai.AsyncOpenAI(
                base_url=url, api_key=KEYS[number], max_retries=0, http_client=http
            )

        async def drain():
            ended.set()
            await closing

        try:
            yield SimpleNamespace(
                openai=client, http=http, batches=batches, answers=answers, drain=drain
            )
        finally:
            await drain()


def lines_of(count, url=COMPLETIONS, **fields):
    """Lines of prompts p0, p1 and so on."""
    return [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": url,
            "body": {"prompt": f"p{n}", "max_tokens": 3} | fields,
        }
        for n in range(count)
    ]


def text_of(lines):
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def begun(client, lines, **fields):
    """A batch of lines, or of bytes."""
    data = lines if isinstance(lines, bytes) else text_of(lines)
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h", **fields
    )


async def ended(client, batch):
    """The batch once nobody works on it; waits for its state, however long that takes."""
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        await asyncio.sleep(0.005)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def read(client, file_id):
    """The lines of an output file."""
    text = (await client.files.content(file_id)).text
    return [json.loads(line) for line in text.splitlines()]
