"""Claude Code, Codex and opencode, unmodified: one call of a tool, the answer to its result, twice.

Each runs in a network that has nothing but loopback. What the model says is scripted by a door
that adds a field to each request, and nothing else.
"""

import json
import re
import subprocess

import httpx
import pytest

from tests.server.clients.agents.coding import PACKAGES, answer_to, binary, coding_run, run
from tests.server.clients.agents.lone_network import LoneNetwork, NoNamespaceError
from tests.server.clients.agents.scripted_door import ScriptedDoor
from tests.server.tool_server import tool_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def network():
    try:
        return LoneNetwork()
    except NoNamespaceError as error:
        pytest.skip(f"no network namespace can be made here: {error}")


@pytest.fixture
def door(tmp_path, network):
    with tool_server(tmp_path, 131072, "--seed-policy", "request") as server:
        door = network.do(ScriptedDoor, server.url, answer_to).open()
        yield door
        door.close()


def printed(network, agent, door, home):
    """What a run of an agent prints, in a folder of its own that is the same each time."""
    if binary(agent) is None:
        pytest.skip(f"{PACKAGES[agent]} is not installed, and no {agent} is on the path")
    done = network.do(run, coding_run(agent, home, f"http://127.0.0.1:{door.server_port}"))
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.decode()


def outside_is_out_of_reach(network, door):
    """Negative control: the server itself, which listens outside, is not to be met from here."""
    host = httpx.URL(door.client.base_url)
    ask = f"import socket; socket.create_connection(('{host.host}', {host.port}), 5)"
    asked = network.do(subprocess.run, ["python3", "-c", ask], capture_output=True)
    return asked.returncode != 0


def ids_of(answer):
    """The ids of an answer whose form has events or chunks."""
    return re.findall(r'"(?:call_id|id)":"([^"]+)"', answer.text)


def test_claude_code_calls_a_tool_and_goes_on_with_its_result(door, network, tmp_path):
    assert outside_is_out_of_reach(network, door)
    found = json.loads(printed(network, "claude", door, tmp_path))
    assert found["result"] == "It printed hello." and found["num_turns"] == 2
    assert not found["is_error"] and found["stop_reason"] == "end_turn"
    first, second = door.bodies
    assert [one["role"] for one in first["messages"]] == ["user", "system"]
    *_, asked, result = second["messages"]
    assert [block["type"] for block in asked["content"]] == ["thinking", "text", "tool_use"]
    assert asked["content"][0]["thinking"] == "I have to run it."
    assert result["content"][0]["content"] == "hello"
    counts = found["usage"]
    assert counts["input_tokens"] > 2 * 30_000 and counts["output_tokens"] > 100
    assert all("tpdet-dropped-tools" not in answer.headers for answer in door.answers)
    # Its sessions, users and hints differ; what the model reads does not, nor do the ids.
    printed(network, "claude", door, tmp_path)
    sessions = [body["metadata"]["user_id"] for body in door.bodies]
    assert len({*sessions}) == 2
    texts = [answer.text for answer in door.answers]
    assert texts[:2] == texts[2:] and "toolu_" in texts[0]


def test_codex_calls_a_tool_and_goes_on_with_its_result(door, network, tmp_path):
    events = [json.loads(line) for line in printed(network, "codex", door, tmp_path).splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert items[-1]["text"] == "It printed hello."
    first, second = door.bodies
    asked, result = second["input"][-2:]
    assert (asked["type"], asked["name"]) == ("function_call", "exec_command")
    assert result["call_id"] == asked["call_id"] and "hello" in str(result["output"])
    assert first["store"] is False and first["stream"] is True
    printed(network, "codex", door, tmp_path)  # its results hold times: the second answers differ
    assert ids_of(door.answers[0]) == ids_of(door.answers[2]) != ids_of(door.answers[1])
    assert any(name.startswith("call_") for name in ids_of(door.answers[0]))


def test_opencode_calls_a_tool_and_goes_on_with_its_result(door, network, tmp_path):
    said = printed(network, "opencode", door, tmp_path)
    first, second = door.bodies
    *_, asked, result = second["messages"]
    (called,) = asked["tool_calls"]
    assert called["function"]["name"] == "bash" and result["tool_call_id"] == called["id"]
    assert "hello" in str(result["content"]) and "It printed hello." in said
    assert first["stream"] is True
    printed(network, "opencode", door, tmp_path)
    assert ids_of(door.answers[0]) == ids_of(door.answers[2]) != ids_of(door.answers[1])
    assert any(name.startswith("call_") for name in ids_of(door.answers[0]))
