"""Coding agents, unmodified: Claude Code, Codex and opencode at a task of one call of a shell.

`python -m tests.server.clients.agents.coding AGENT HOME` runs one at the address in TPDET_URL.
TPDET_TEST_AGENTS names a folder of binaries that are not on the path: `npm install @openai/codex
opencode-ai` makes one, node_modules/.bin.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.lib.server.harness import MODEL
from tests.server.parrot import called

PACKAGES = {"claude": "claude-agent-sdk", "codex": "@openai/codex", "opencode": "opencode-ai"}
TASK = "Run `echo hello` and tell me what it printed."
_DESCRIBED = {"command": "echo hello", "description": "Say it"}
_CALLS = {"Bash": _DESCRIBED, "bash": _DESCRIBED, "exec_command": {"cmd": "echo hello"}}
_RESULTS = ('"tool_result"', '"function_call_output"', '"role": "tool"')


def answer_to(body: dict[str, Any]) -> str:
    """What the model says to a request of an agent: a call of its shell, and then the result."""
    if any(mark in json.dumps(body.get("messages", body.get("input"))) for mark in _RESULTS):
        return "It printed hello."
    tools = body.get("tools") or ()
    names = {tool.get("name") or tool.get("function", {}).get("name") for tool in tools}
    shell = next((name for name in _CALLS if name in names), None)
    if shell is None:
        return "A title"
    call = called(shell, **_CALLS[shell])
    return f"<think>I have to run it.</think>Let me see.\n\n{call}"


def binary(agent: str) -> str | None:
    """The path of an agent's program, if there is one."""
    spec = importlib.util.find_spec("claude_agent_sdk") if agent == "claude" else None
    bundled = Path(spec.origin).parent / "_bundled" / agent if spec and spec.origin else None
    if bundled and bundled.exists():
        return str(bundled)
    more = os.environ.get("TPDET_TEST_AGENTS", "")
    return shutil.which(agent, path=os.pathsep.join(filter(None, (more, os.environ["PATH"]))))


class CodingRun(NamedTuple):
    """A command, its whole environment, and the folder where it works."""

    command: list[str]
    environment: dict[str, str]
    folder: Path


def coding_run(agent: str, home: Path, address: str) -> CodingRun:
    """How an agent that is there does the task at a server; its settings are written to home."""
    program = binary(agent)
    assert program is not None, PACKAGES[agent]
    folder = home / "work"
    folder.mkdir(exist_ok=True, parents=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1"}
    if agent == "claude":
        environment |= {
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        }
        command = [program, "-p", TASK, "--output-format", "json", "--allowedTools", "Bash"]
        return CodingRun(command, environment, folder)
    if agent == "codex":
        (home / ".codex").mkdir(exist_ok=True)
        (home / ".codex" / "config.toml").write_text(
            f'model = "{MODEL}"\nmodel_provider = "tpdet"\n\n[model_providers.tpdet]\n'
            f'name = "tpdet"\nbase_url = "{address}/v1"\nwire_api = "responses"\n'
        )
        command = [program, "exec", "--skip-git-repo-check", "--json"]
        command += ["--dangerously-bypass-approvals-and-sandbox", TASK]
        return CodingRun(command, environment, folder)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "tpdet",
        "options": {"baseURL": f"{address}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 131072, "output": 4096}}},
    }
    settings = {"provider": {"tpdet": provider}, "model": f"tpdet/{MODEL}"}
    (folder / "opencode.json").write_text(json.dumps(settings))
    environment |= {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return CodingRun([program, "run", "--format", "json", TASK], environment, folder)


def run(coding: CodingRun) -> subprocess.CompletedProcess[bytes]:
    """Run it to its end."""
    return subprocess.run(
        coding.command,
        env=coding.environment,
        cwd=coding.folder,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


if __name__ == "__main__":
    done = run(coding_run(sys.argv[1], Path(sys.argv[2]), os.environ["TPDET_URL"]))
    sys.stderr.write(done.stderr.decode(errors="replace"))
    sys.exit(done.returncode)
