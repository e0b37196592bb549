"""Records what agents ask: `python -m tests.server.clients.agents.record FOLDER` (for tapes).

Each client runs unmodified at its tasks under `tpdet tape record`, before a server whose answers
are scripted; the coding agents in a network with nothing but loopback. Written is requests.jsonl.xz
beside this file. Three things are no longer as they were recorded: the home and the kernel of the
machine have other names, and the prose of Claude Code, whose licence is its own, is made up.
"""

import json
import lzma
import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from tests.lib.server.harness import Server
from tests.lib.text.made_conversations import CHATML
from tests.lib.tree import ROOT
from tests.server.clients.agents import coding, tasks
from tests.server.clients.agents.claude_code import prose
from tests.server.clients.agents.clients import CLIENTS
from tests.server.clients.agents.lone_network import LoneNetwork
from tests.server.clients.agents.requests import FILE, PATHS, RecordedRequest
from tests.server.clients.agents.scripted_door import ScriptedDoor
from tests.server.tool_server import MARKS
from tpdet.launch.host.interpreter import python_command
from tpdet.requests.body.messages_blocks import BILLING
from tpdet.tools.tape.tape_file import read_tape

Json = dict[str, Any]
THIRDS = dict(zip(PATHS, (67, 67, 66), strict=True))
AGENTS = {"opencode": PATHS[0], "codex": PATHS[1], "claude": PATHS[2]}
_KERNEL = (platform.release(), "6.1.0")
_LONG = 60
"""Characters of a text that is prose; names, commands and marks are shorter."""


def main(folder: Path) -> None:
    """Record every client and write the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "template.jinja").write_text(CHATML)
    flags = ("--chat-template", str(folder / "template.jinja"), "--reasoning-parser", "auto")
    flags += ("--tool-call-parser", "auto", "--max-model-len", "131072")
    server = Server(folder, *flags, "--seed-policy", "request", marks=MARKS)
    network = LoneNetwork()
    try:
        recorded: dict[str, list[RecordedRequest]] = {}
        door = network.do(ScriptedDoor, server.url, _says).open()
        for name in AGENTS:
            command = ("-m", "tests.server.clients.agents.coding", name, str(folder / "home"))
            tape = network.do(_record, folder / f"{name}.tape", door, command)
            recorded[name] = [*_of_tape(name, tape, str(folder / "home"))]
        door.close()
        door = ScriptedDoor(server.url, _says).open()
        for name in CLIENTS:
            command = ("-m", "tests.server.clients.agents.clients", name)
            recorded[name] = [*_of_tape(name, _record(folder / f"{name}.tape", door, command))]
            print(f"{name}: {len(recorded[name])} requests", flush=True)
        door.close()
    finally:
        server.stop()
    rows = [row for path, count in THIRDS.items() for row in _some(recorded, path, count)]
    lines = "".join(json.dumps(row._asdict(), ensure_ascii=False) + "\n" for row in rows)
    FILE.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(rows)} requests, {len(lines)} bytes, {FILE.stat().st_size} of them packed")


def _says(body: Json) -> str:
    return tasks.answer_to(body) or coding.answer_to(body)


def _record(tape: Path, door: ScriptedDoor, command: tuple[str, ...]) -> Path:
    """Run a client under the recorder, unless there is its tape. Raises CalledProcessError."""
    if tape.exists():
        return tape
    recorder = python_command("-m", "tpdet", "tape", "record", "-o", str(tape))
    recorder += ["--url", f"http://127.0.0.1:{door.server_port}", "--", *python_command(*command)]
    found = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(recorder, env=found, check=True, stdin=subprocess.DEVNULL)
    return tape


def _of_tape(client: str, tape: Path, home: str = "") -> Iterator[RecordedRequest]:
    """The requests of a tape that a model answered."""
    for turn in read_tape(str(tape)).turns:
        if turn.is_answer and turn.body is not None:
            said = _says(turn.body)
            body = turn.body if client != "claude" else _reworded(turn.body, random.Random(41))
            text = json.dumps(body, ensure_ascii=False).replace(*_KERNEL)
            text = text.replace(home, "/home/agent") if home else text
            yield RecordedRequest(client, turn.path, said, json.loads(text))


def _some(
    recorded: dict[str, list[RecordedRequest]], path: str, count: int
) -> list[RecordedRequest]:
    """So many requests of a path, from all its clients in turn; none is there twice."""
    rows = [
        [row for row in each if row.path.partition("?")[0] == path] for each in recorded.values()
    ]
    distinct = {json.dumps(row.body): row for row in chain(*zip_longest(*rows)) if row is not None}
    if len(distinct) < count:
        raise RuntimeError(f"{path}: {len(distinct)} requests were recorded, {count} are needed")
    return sorted([*distinct.values()][:count], key=lambda row: row.client)


def _reworded(value: Any, draw: random.Random) -> Any:
    """A body whose prose is made up, of the same length; what was asked and called is kept."""
    if isinstance(value, dict):
        return {key: _reworded(one, draw) for key, one in value.items()}
    if isinstance(value, list):
        return [_reworded(one, draw) for one in value]
    if not isinstance(value, str) or len(value) <= _LONG or value.startswith((BILLING, "{")):
        return value
    if re.fullmatch(r"\S+", value) or coding.TASK in value:
        return value
    return prose(draw, len(value))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
