"""Claude Code itself, unmodified: one call of a tool and the answer to its result, twice alike.

The binary is that of the package claude-agent-sdk. What the model says is scripted by a door on
loopback that adds a field to each request, and nothing else.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from tests.lib.server.harness import MODEL, Server
from tests.lib.text.made_conversations import CHATML

pytestmark = pytest.mark.slow

END, OPENING, CLOSING, THINK, THOUGHT = map(chr, range(0xE002, 0xE007))
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TASK = "Run `echo hello` and tell me what it printed."
CALL = json.dumps({"name": "Bash", "arguments": {"command": "echo hello", "description": "Say it"}})
SAID = (
    f"{THINK}I have to run it.{THOUGHT}Let me see.\n\n{OPENING}\n{CALL}\n{CLOSING}{END}",
    f"It printed hello.{END}",
)


def binary():
    """The path of Claude Code; the test is skipped without it."""
    spec = importlib.util.find_spec("claude_agent_sdk")
    bundled = Path(spec.origin).parent / "_bundled" / "claude" if spec and spec.origin else None
    path = str(bundled) if bundled and bundled.exists() else shutil.which("claude")
    if path is None:
        pytest.skip("claude-agent-sdk is not installed, and no claude is on the path")
    return path


class Script(BaseHTTPRequestHandler):
    """Passes requests on to a server, with what it is to say to them."""

    protocol_version = "HTTP/1.1"
    url = ""
    bodies: ClassVar[list] = []
    answers: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_result = "tool_result" in json.dumps(body["messages"])
        kept = ("authorization", "anthropic-version", "anthropic-beta")
        headers = {name: self.headers[name] for name in kept}
        answer = httpx.post(
            self.url + self.path,
            json=body | {"cache_salt": f"text={SAID[is_result]}"},
            headers=headers,
            timeout=300,
        )
        self.bodies.append(body)
        self.answers.append(answer)
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers["content-type"])
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def script(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(CHATML)
    flags = ("--chat-template", str(template), "--reasoning-parser", "auto")
    flags += ("--tool-call-parser", "auto", "--max-model-len", "131072")
    server = Server(tmp_path, *flags, "--seed-policy", "request", marks=MARKS)
    Script.url, Script.bodies, Script.answers = server.url, [], []
    door = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    threading.Thread(target=door.serve_forever, daemon=True).start()
    yield door
    door.shutdown()
    assert server.stop() == 0, server.log.read_text()


def run(claude, door, home):
    """What a run of Claude Code prints, an object."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{door.server_port}",
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    work = home / "work"
    work.mkdir(exist_ok=True)
    command = [claude, "-p", TASK, "--output-format", "json", "--allowedTools", "Bash"]
    done = subprocess.run(
        command, env=environment, cwd=work, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def test_claude_code_calls_a_tool_and_goes_on_with_its_result(script, tmp_path):
    claude = binary()
    home = tmp_path / "home"
    home.mkdir()
    found = run(claude, script, home)
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
    run(claude, script, home)
    sessions = [body["metadata"]["user_id"] for body in Script.bodies]
    assert len({*sessions}) == 2
    texts = [answer.text for answer in Script.answers]
    assert texts[:2] == texts[2:] and "toolu_" in texts[0]
