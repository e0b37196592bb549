"""Claude Code, Codex and opencode, unmodified: one call of a tool, the answer to its result, twice.

Each runs in a network that has nothing but loopback. What the model says is scripted by a door
that adds a field to each request, and nothing else. TPDET_TEST_AGENTS names a folder of binaries
that are not on the path: `npm install @openai/codex opencode-ai` makes one, node_modules/.bin.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from tests.lib.server.harness import MODEL, Server
from tests.lib.server.lone_network import LoneNetwork, NoNamespaceError
from tests.lib.text.made_conversations import CHATML

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

END, OPENING, CLOSING, THINK, THOUGHT = map(chr, range(0xE002, 0xE007))
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TASK = "Run `echo hello` and tell me what it printed."
DESCRIBED = {"command": "echo hello", "description": "Say it"}
CALLS = {"claude": ("Bash", DESCRIBED), "opencode": ("bash", DESCRIBED),
         "codex": ("exec_command", {"cmd": "echo hello"})}  # fmt: skip
PACKAGES = {"claude": "claude-agent-sdk", "codex": "@openai/codex", "opencode": "opencode-ai"}
RESULTS = ('"tool_result"', '"function_call_output"', '"role": "tool"')


def binary(agent):
    """The path of an agent; the test is skipped without it."""
    spec = importlib.util.find_spec("claude_agent_sdk") if agent == "claude" else None
    bundled = Path(spec.origin).parent / "_bundled" / agent if spec and spec.origin else None
    if bundled and bundled.exists():
        return str(bundled)
    more = os.environ.get("TPDET_TEST_AGENTS", "")
    path = shutil.which(agent, path=os.pathsep.join(filter(None, (more, os.environ["PATH"]))))
    if path is None:
        pytest.skip(f"{PACKAGES[agent]} is not installed, and no {agent} is on the path")
    return path


class Script(BaseHTTPRequestHandler):
    """Passes requests on to a server, with what it is to say to them."""

    protocol_version = "HTTP/1.1"
    url, agent = "", ""
    client: ClassVar[httpx.Client]
    bodies: ClassVar[list] = []
    answers: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        kept = ("authorization", "anthropic-version", "anthropic-beta")
        headers = {name: self.headers[name] for name in kept if self.headers[name]}
        asked = body | {"cache_salt": f"text={self.said(body)}"}
        answer = self.client.post(self.url + self.path, json=asked, headers=headers, timeout=300)
        if body.get("tools"):  # not what titles are asked for
            self.bodies.append(body)
            self.answers.append(answer)
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers["content-type"])
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def do_GET(self):
        self.send_error(404)

    def said(self, body):
        if any(mark in json.dumps(body.get("messages", body.get("input"))) for mark in RESULTS):
            return f"It printed hello.{END}"
        if not body.get("tools"):
            return f"A title{END}"
        name, arguments = CALLS[self.agent]
        call = json.dumps({"name": name, "arguments": arguments})
        return f"{THINK}I have to run it.{THOUGHT}Let me see.\n\n{OPENING}\n{call}\n{CLOSING}{END}"

    def log_message(self, *arguments):
        pass


@pytest.fixture
def network():
    try:
        return LoneNetwork()
    except NoNamespaceError as error:
        pytest.skip(f"no network namespace can be made here: {error}")


@pytest.fixture
def script(tmp_path, network):
    template = tmp_path / "template.jinja"
    template.write_text(CHATML)
    flags = ("--chat-template", str(template), "--reasoning-parser", "auto")
    flags += ("--tool-call-parser", "auto", "--max-model-len", "131072")
    server = Server(tmp_path, *flags, "--seed-policy", "request", marks=MARKS)
    Script.url, Script.bodies, Script.answers = server.url, [], []
    door = network.do(ThreadingHTTPServer, ("127.0.0.1", 0), Script)
    threading.Thread(target=door.serve_forever, daemon=True).start()
    with httpx.Client() as Script.client:
        yield door
        door.shutdown()
    assert server.stop() == 0, server.log.read_text()


def run(network, command, home, **environment):
    """What a run of an agent prints, in a folder of its own that is the same each time."""
    work = home / "work"
    work.mkdir(exist_ok=True, parents=True)
    kept = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1"}
    done = network.do(
        subprocess.run,
        command,
        env=kept | environment,
        cwd=work,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.decode()


def outside_is_out_of_reach(network):
    """Negative control: the server itself, which listens outside, is not to be met from here."""
    host = httpx.URL(Script.url)
    ask = f"import socket; socket.create_connection(('{host.host}', {host.port}), 5)"
    asked = network.do(subprocess.run, ["python3", "-c", ask], capture_output=True)
    return asked.returncode != 0


def ids_of(answer):
    """The ids of an answer whose form has events or chunks."""
    return re.findall(r'"(?:call_id|id)":"([^"]+)"', answer.text)


def test_claude_code_calls_a_tool_and_goes_on_with_its_result(script, network, tmp_path):
    Script.agent = "claude"
    command = [binary("claude"), "-p", TASK, "--output-format", "json", "--allowedTools", "Bash"]
    environment = {
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{script.server_port}",
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    assert outside_is_out_of_reach(network)
    found = json.loads(run(network, command, tmp_path / "home", **environment))
    assert found["result"] == "It printed hello." and found["num_turns"] == 2
    assert not found["is_error"] and found["stop_reason"] == "end_turn"
    first, second = Script.bodies
    assert [one["role"] for one in first["messages"]] == ["user", "system"]
    *_, asked, result = second["messages"]
    assert [block["type"] for block in asked["content"]] == ["thinking", "text", "tool_use"]
    assert asked["content"][0]["thinking"] == "I have to run it."
    assert result["content"][0]["content"] == "hello"
    counts = found["usage"]
    assert counts["input_tokens"] > 2 * 30_000 and counts["output_tokens"] > 100
    assert all("tpdet-dropped-tools" not in answer.headers for answer in Script.answers)
    # Its sessions, users and hints differ; what the model reads does not, nor do the ids.
    run(network, command, tmp_path / "home", **environment)
    sessions = [body["metadata"]["user_id"] for body in Script.bodies]
    assert len({*sessions}) == 2
    texts = [answer.text for answer in Script.answers]
    assert texts[:2] == texts[2:] and "toolu_" in texts[0]


def test_codex_calls_a_tool_and_goes_on_with_its_result(script, network, tmp_path):
    Script.agent, home = "codex", tmp_path / "home"
    command = [binary("codex"), "exec", "--skip-git-repo-check", "--json"]
    command += ["--dangerously-bypass-approvals-and-sandbox", TASK]
    folder = home / ".codex"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "tpdet"\n\n[model_providers.tpdet]\n'
        f'name = "tpdet"\nbase_url = "http://127.0.0.1:{script.server_port}/v1"\n'
        'wire_api = "responses"\n'
    )
    events = [json.loads(line) for line in run(network, command, home).splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert items[-1]["text"] == "It printed hello."
    first, second = Script.bodies
    asked, result = second["input"][-2:]
    assert (asked["type"], asked["name"]) == ("function_call", "exec_command")
    assert result["call_id"] == asked["call_id"] and "hello" in str(result["output"])
    assert first["store"] is False and first["stream"] is True
    run(network, command, home)  # its results hold times: the second answers differ
    assert ids_of(Script.answers[0]) == ids_of(Script.answers[2]) != ids_of(Script.answers[1])
    assert any(name.startswith("call_") for name in ids_of(Script.answers[0]))


def test_opencode_calls_a_tool_and_goes_on_with_its_result(script, network, tmp_path):
    Script.agent, home = "opencode", tmp_path / "home"
    command = [binary("opencode"), "run", "--format", "json", TASK]
    (home / "work").mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "tpdet",
        "options": {"baseURL": f"http://127.0.0.1:{script.server_port}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 131072, "output": 4096}}},
    }
    (home / "work" / "opencode.json").write_text(
        json.dumps({"provider": {"tpdet": provider}, "model": f"tpdet/{MODEL}"})
    )
    environment = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    printed = run(network, command, home, **environment)
    first, second = Script.bodies
    *_, asked, result = second["messages"]
    (called,) = asked["tool_calls"]
    assert called["function"]["name"] == "bash" and result["tool_call_id"] == called["id"]
    assert "hello" in str(result["content"]) and "It printed hello." in printed
    assert first["stream"] is True
    run(network, command, home, **environment)
    assert ids_of(Script.answers[0]) == ids_of(Script.answers[2]) != ids_of(Script.answers[1])
    assert any(name.startswith("call_") for name in ids_of(Script.answers[0]))
