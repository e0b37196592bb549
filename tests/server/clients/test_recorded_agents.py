"""A spread of the recorded requests of agents: the same answer whole and streamed, alone and not.

An engine of fixed tokens says what it said when they were recorded. All of them, by a model and at
several sizes, are of tests/server/end_to_end/test_agent_requests.py.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.clients.agents.joined import joined, plain
from tests.server.clients.agents.requests import FILE, PATHS, recorded_requests
from tests.server.clients.agents.scripted_door import scripted
from tests.server.tool_server import tool_server

ROWS = recorded_requests()
CLIENTS = 18
SPREAD = [*{row.client: row for row in ROWS}.values()][::2]  # the last of a client


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with tool_server(
        tmp_path_factory.mktemp("recorded"), 131072, "--seed-policy", "request"
    ) as found:
        yield found


def test_they_are_a_third_a_route_and_of_all_clients():
    assert [*Counter(row.route for row in ROWS).values()] == [67, 67, 66]
    assert len({row.client for row in ROWS}) == CLIENTS and FILE.stat().st_size < 100_000
    turns = Counter((row.client, bool(row.body.get("tools"))) for row in ROWS)
    assert all(turns[agent, True] == 2 for agent in ("claude", "codex", "opencode"))


def test_each_has_one_answer_whole_and_streamed_alone_and_in_a_crowd(server):
    def asked(row, **fields):
        body = row.limited(1000) | {"cache_salt": scripted(row.said)} | fields
        found = server.http.post(row.path, json=body)
        assert found.status_code == 200, found.text
        return found

    def whole(row, **fields):
        return row.without_free(asked(row, **fields).json())

    def streamed(row):
        options = {"stream_options": {"include_usage": True}} if row.route == PATHS[0] else {}
        found = asked(row, stream=True, **options)
        return plain(row.without_free(joined(row.route, found.text)))

    alone = [*map(whole, SPREAD)]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(streamed, SPREAD)] == [*map(plain, alone)]
    calling = sum("<tool_call>" in row.said for row in SPREAD)
    assert sum(called(answer) for answer in alone) >= calling > 2
    for row, answer in list(zip(SPREAD, alone, strict=True))[::3]:  # the control
        other = whole(row, seed=5)
        assert other["id"] != answer["id"] and other["tpdet"] != answer["tpdet"]


def called(answer):
    """Whether an answer of any route has a call."""
    said = [*answer.get("content", ()), *answer.get("output", ())]
    chats = any(one["message"].get("tool_calls") for one in answer.get("choices", ()))
    return chats or any(one["type"] in ("tool_use", "function_call") for one in said)
