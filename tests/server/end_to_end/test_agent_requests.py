"""Two hundred recorded requests of agents have one answer each: body, ids and bits.

A third each by chats, responses and messages. At TP 1, 2 and 4, alone and in a crowd, whole and
streamed, with drafts and without, with a prefix that was kept and without one.
TPDET_TEST_REQUESTS is another number of them.
"""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.lib.server.served import Served
from tests.server.clients.agents.joined import joined, plain
from tests.server.clients.agents.requests import PATHS, recorded_requests
from tests.server.parrot import Lesson, make_parrot
from tpdet.requests.body.messages_body import MessagesBody, MessagesChat
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.responses_body import ResponsesBody, chat_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

ROWS = recorded_requests()
COUNT = int(os.environ.get("TPDET_TEST_REQUESTS", len(ROWS)))
LIMITS = (24, 48, 100)  # tokens of an answer
CONTEXT = 32768
FLAGS = (
    "--device", "cpu", "--tool-call-parser", "auto", "--reasoning-parser", "auto",
    "--served-model-name", "demo", "--seed-policy", "request", "--kv-pages", "400",
    "--step-timeout", "120",  # steps of 8,192 tokens, beside whatever else the machine does
)  # fmt: skip
COLD = "--no-enable-prefix-caching"
CROWD = 16


@pytest.fixture(scope="module")
def rows():
    """The requests, those of the three routes in turn, each with its body."""
    step = -(-len(ROWS) // COUNT)
    return [(row, row.limited(LIMITS[i % 3])) for i, row in enumerate(ROWS[::step])]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    """A model that has learnt one call of each client that says few words."""
    folder = tmp_path_factory.mktemp("agents") / "model"
    calling = {}
    for row in ROWS:
        if "<tool_call>" in row.said and len(str(row.body)) < 8000:
            calling.setdefault(row.client, []).append(row)
    lessons = [
        Lesson(chat_fields(found[place % len(found)]), found[place % len(found)].said)
        for place, found in enumerate(calling.values())
    ]
    learnt = make_parrot(folder, lessons, context=CONTEXT)
    print(f"\nparrot: {len(lessons)} lessons, {learnt.seconds:.0f} s, worst {learnt.worst:.3f}")
    return folder


def chat_fields(row):
    """The chat that a request asks for."""
    if row.route == PATHS[1]:
        return chat_of(parse_body(ResponsesBody, row.body)).fields
    if row.route == PATHS[2]:
        return MessagesChat(parse_body(MessagesBody, row.body)).fields
    return row.body


class Client:
    """Asks one server for answers, whole or streamed."""

    def __init__(self, served):
        self._http = httpx.Client(base_url=served.url.removesuffix("/v1"), timeout=3600)

    @property
    def cached(self):
        """Tokens of prompts that were kept from earlier ones."""
        lines = self._http.get("/metrics").text.splitlines()
        counts = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total{")]
        return sum(float(line.split()[-1]) for line in counts)

    def answers(self, rows, at_once, stream=False):
        """What each request is answered, as a whole answer without its free fields."""
        ask = self._streamed if stream else self._whole
        with ThreadPoolExecutor(at_once) as pool:
            return [*pool.map(ask, rows)]

    def _whole(self, row):
        return row[0].without_free(self._post(row[0].path, row[1]).json())

    def _streamed(self, row):
        recorded, body = row
        options = {"stream_options": {"include_usage": True}} if recorded.route == PATHS[0] else {}
        found = self._post(recorded.path, body | {"stream": True} | options)
        return plain(recorded.without_free(joined(recorded.route, found.text)))

    def _post(self, path, body):
        found = self._http.post(path, json=body)
        assert found.status_code == 200, found.text
        return found


@pytest.fixture(scope="module")
def expected(parrot, rows, tmp_path_factory):
    """The answers of one rank, one at a time, without drafts and without a kept prefix."""
    served = Served(parrot, tmp_path_factory.mktemp("first"), 1, *FLAGS, COLD, "--drafts", "off")
    try:
        client = Client(served)
        found = client.answers(rows, 1)
        assert client.cached == 0
    finally:
        served.end()
    calls = [call_ids(answer) for answer in found]
    routes = Counter(row.route for row, _ in rows)
    print(f"\n{dict(routes)}, {sum(map(len, calls))} calls in {sum(map(bool, calls))} answers")
    assert sum(map(len, calls)) > len(rows) // 4
    owners = {}  # clients that ask for the same get the same ids; nobody else gets them
    for answer, made in zip(found, calls, strict=True):
        assert len({*made}) == len(made)
        assert {owners.setdefault(one, digest(answer)) for one in made} <= {digest(answer)}
    requests = len({*map(digest, found)})
    print(f"{requests} different requests, {len(owners)} different ids of calls")
    assert requests > len(rows) // 2
    return found


def digest(answer):
    return answer["tpdet"]["request_digest"]


def call_ids(answer):
    """The ids of the calls in an answer of any route."""
    made = [c for one in answer.get("choices", ()) for c in one["message"].get("tool_calls") or ()]
    made += [one for one in answer.get("content", ()) if one["type"] == "tool_use"]
    said = [one for one in answer.get("output", ()) if one["type"] == "function_call"]
    return [one["id"] for one in made] + [one["call_id"] for one in said]


@pytest.mark.parametrize(("tp", "drafts"), [(1, "earlier"), (2, "off"), (4, "auto")])
def test_each_request_has_one_answer(parrot, rows, expected, tmp_path, tp, drafts):
    served = Served(parrot, tmp_path, tp, *FLAGS, "--drafts", drafts)
    try:
        client = Client(served)
        whole = client.answers(rows, CROWD)
        for (row, body), one, other in zip(rows, whole, expected, strict=True):
            assert one == other, (row.client, body)
        streamed = client.answers(rows[::-1], CROWD, stream=True)[::-1]
        for (row, body), one, other in zip(rows, streamed, expected, strict=True):
            assert one == plain(other), (row.client, body)
        assert client.cached > 256 * len(rows) // 4
        # The control: what is compared depends on the request. A seed counts where noise is drawn.
        sampled = [place for place, (_, body) in enumerate(rows) if body.get("temperature", 1) > 0]
        for place in sampled[:: len(sampled) // 3]:
            row, body = rows[place]
            (other,) = client.answers([(row, body | {"seed": 10**6})], 1)
            assert other["id"] != expected[place]["id"]
            assert other["tpdet"] != expected[place]["tpdet"]
        print(
            f"\nTP {tp}, drafts {drafts}: {len(whole)} whole and {len(streamed)} streamed equal; "
            f"{client.cached:.0f} prompt tokens were kept"
        )
    finally:
        served.end()
