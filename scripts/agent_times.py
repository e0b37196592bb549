"""Times what requests of agents cost a server on a CPU: events of chats, first tokens of turns.

    python scripts/agent_times.py docs/results

The HTTP process's time an event comes from `scripts.front_load`, 64 readers: chats of a
server without a parser of calls and with one, and chats with tools. Runs alternate; each case's
time is the least of its runs, of the processor. First tokens: of a preamble of 40 KB and a short
question, at a real server with a random model, whose prefix cache has the preamble or not.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.lib.server.served import Served  # noqa: E402
from tpdet.launch.host.interpreter import python_command  # noqa: E402
from tpdet.tools.measurement.results_file import append_run  # noqa: E402
from tpdet.tools.synthetic.make_model import make_model  # noqa: E402
from tpdet.tools.worlds.machine import machine  # noqa: E402

READERS, STEPS, RUNS, TURNS = 64, 250, 3, 2
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CASES = {
    "chat, no parser of calls": ["--parser", "off"],
    "chat, a parser and no tools": ["--parser", "hermes"],
    "chat with a tool": ["--parser", "hermes", "--more", json.dumps({"tools": [TOOL]})],
}
WORDS = "Read the file before you change it, and say in one line what you did to it. "
CHARACTERS = 40_000


def main() -> None:
    """Print and record the rows."""
    for part in (turn_rows, event_rows):
        rows = part()
        append_run(Path(sys.argv[1]), "agents", machine("cpu", 1), "scripts/agent_times.py", rows)
        print(*rows, sep="\n", flush=True)


def event_rows() -> list[dict[str, Any]]:
    """The HTTP process's microseconds an event, beside those of chats without a parser."""
    found: dict[str, list[float]] = {case: [] for case in CASES}
    command = python_command("-m", "scripts.front_load", "--chat", "--prompt", "64")
    command += ["--streams", str(READERS), "--steps", str(STEPS)]
    found_here = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(RUNS):
        for case, flags in CASES.items():
            done = subprocess.run(
                [*command, *flags], env=found_here, capture_output=True, check=True
            )
            found[case].append(json.loads(done.stdout)["us_an_event"])
    least = {case: min(times) for case, times in found.items()}
    plain, *_ = CASES
    return [
        {"case": case, "value": value, "unit": "us an event", "batch": READERS}
        | ({} if case == plain else {"peer": plain, "peer_value": least[plain]})
        | ({} if case == plain else {"ratio": value / least[plain]})
        for case, value in least.items()
    ]


def turn_rows() -> list[dict[str, Any]]:
    """Seconds to the first token of a turn, with the preamble in the cache and without."""
    preamble = (WORDS * (CHARACTERS // len(WORDS) + 1))[:CHARACTERS]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, like="qwen3", hidden=128, layers=2, heads=8, kv_heads=4, head_dim=16,
                   intermediate=256, tie=True, vocab=2048, context=32768, seed=0)  # fmt: skip
        served = Served(model, Path(folder), 1, "--device", "cpu", "--max-model-len", "32768")
        try:
            with httpx.Client(base_url=served.url, timeout=600) as http:
                times: dict[str, list[float]] = {"cold": [], "hit": []}
                tokens = 0
                for turn in range(TURNS):
                    # The first words differ, so nothing of an earlier round is found.
                    said = [{"role": "system", "content": f"Run {turn}. {preamble}"}]
                    for case in times:
                        said = [*said, {"role": "user", "content": f"Question of {case}?"}]
                        seconds, tokens = first_token(http, said)
                        times[case].append(seconds)
        finally:
            served.kill()
    least = {case: min(seconds) for case, seconds in times.items()}
    named = {"model": "qwen3, hidden 128, 2 layers", "context": tokens, "unit": "s"}
    return [
        {"case": "first token, 40 KB, cold", "value": least["cold"], **named},
        {"case": "first token, 40 KB, the second turn", "value": least["hit"], **named,
         "peer": "cold", "peer_value": least["cold"], "ratio": least["hit"] / least["cold"]},
    ]  # fmt: skip


def first_token(http: httpx.Client, said: list[dict[str, str]]) -> tuple[float, int]:
    """Seconds until a chat's first event, and the tokens of its prompt."""
    body = {"model": "tiny", "messages": said, "max_tokens": 2, "ignore_eos": True, "seed": 1}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    begin, first, usage = time.monotonic(), 0.0, {}
    with http.stream("POST", "/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic() - begin
                usage = json.loads(line[6:]).get("usage") or usage
    return first, int(usage["prompt_tokens"])


if __name__ == "__main__":
    main()
