"""Holds the receipts of servers under load to a replay at TP 1; docs/audit.md quotes the figures.

    python -m scripts.replayed_receipts MODEL docs/results --device cpu --tp 2,4

At each size a server answers requests of all kinds, a batch of choices at a time: sampled with and
without a seed, greedy, of several choices and prompts, with penalties, stops and schemas, whole and
streamed, and streams that are given up. Then all its receipts are replayed by one rank. It ends
with 1 if one is missing or differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tpdet.audit.receipts.keys import TrustedKeys, generate_key
from tpdet.launch.host.interpreter import python_command, python_environment
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
COMPLETIONS, CHATS = "completions", "chat/completions"
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"max_tokens": 8}),
    (COMPLETIONS, {"prompts": 2, "n": 2, "temperature": 0.8, "top_p": 0.9}),
    (COMPLETIONS, {"prompts": 2, "max_tokens": 8, "tpdet": {"seeds": [3, 4]}}),
    (COMPLETIONS, {"max_tokens": 40, "stop": ["e"], "presence_penalty": 1}),
    (COMPLETIONS, {"max_tokens": 40, "response_format": FORM, "seed": 5}),
    (COMPLETIONS, {"max_tokens": 8, "echo": True, "logprobs": 1, "temperature": 0}),
    (CHATS, {"max_tokens": 30, "n": 2, "response_format": FORM}),
    (CHATS, {"max_tokens": 30, "logprobs": True, "top_logprobs": 2, "stream": True}),
    (CHATS, {"max_tokens": 20, "frequency_penalty": 0.5, "top_k": 20, "stream": True, "n": 3}),
    (COMPLETIONS, {"max_tokens": 20, "temperature": 0, "repetition_penalty": 1.2, "stream": True}),
)
GIVEN_UP = 50
"""One stream in so many is given up."""


class Served(NamedTuple):
    """What a server answered: requests, and the seconds that they took together."""

    requests: int
    seconds: float


def body_of(number: int, kind: dict[str, Any], longer: int) -> dict[str, Any]:
    """The body of a request; each has another prompt, and many begin alike."""
    body = {"model": "it", **kind, "max_tokens": longer * kind.get("max_tokens", 16)}
    text = f"Question {number % 7}. The number {number} is"
    prompts = body.pop("prompts", 1)
    if kind in [fields for path, fields in KINDS if path == CHATS]:
        return body | {"messages": [{"role": "user", "content": text}]}
    return body | {"prompt": text if prompts == 1 else [f"{text} {i}" for i in range(prompts)]}


def ask(url: str, number: int, longer: int) -> None:
    """Send one request, and read its answer to the end. Raises for another status than 200."""
    path, kind = KINDS[number % len(KINDS)]
    data = json.dumps(body_of(number, kind, longer)).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/{path}", data, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        if kind.get("stream") and number // len(KINDS) % GIVEN_UP == 0:
            answer.readline()
            return
        answer.read()


def serve(options: argparse.Namespace, folder: Path, tp: int) -> Served:
    """Start a server with receipts below a folder, ask it all, and stop it."""
    run = folder / "run"
    key = generate_key(folder / "audit.key")
    TrustedKeys((key.public,)).write(folder / "keys.json")
    flags = ["--tp", tp, "--device", options.device, "--run-dir", run, "--port", 0]
    flags += ["--audit-dir", folder / "audit", "--audit-key", folder / "audit.key"]
    flags += ["--http-processes", 2, "--served-model-name", "it", "--step-timeout", 600]
    flags += ["--load-format", options.load_format, "--max-num-seqs", options.batch]
    command = python_command("-m", "tpdet", "serve", *map(str, [options.model, *flags]))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env=python_environment(), stdout=log, stderr=log)
    try:
        while not (run / "ready.json").exists():
            if server.poll() is not None:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.1)
        url = json.loads((run / "ready.json").read_text())["url"]
        begin = time.monotonic()
        with ThreadPoolExecutor(options.batch) as pool:
            asked = range(options.answers)
            list(pool.map(lambda number: ask(url, number, options.longer), asked))
        return Served(options.answers, time.monotonic() - begin)
    finally:
        server.terminate()
        if server.wait() != 0:
            print((folder / "log").read_text(), file=sys.stderr)


def replay(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The summary of `tpdet replay` at TP 1, whatever it is."""
    arguments = ["--model", options.model, "--keys", folder / "keys.json"]
    arguments += ["--device", options.device, "--load-format", options.load_format]
    command = python_command("-m", "tpdet", "replay", str(folder / "audit"), "--json", "--tp", "1")
    run = subprocess.run(
        [*command, *map(str, arguments)], env=python_environment(), capture_output=True, text=True
    )
    if run.returncode not in (0, 1, 78):
        raise RuntimeError(run.stderr)
    *findings, summary = run.stdout.splitlines()
    print(*findings[:5], summary, sep="\n", flush=True)
    return json.loads(summary)


def proved(options: argparse.Namespace, tp: int) -> tuple[list[dict[str, Any]], bool]:
    """The rows of one size, and whether every receipt is there and equal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served = serve(options, folder, tp)
        summary = replay(options, folder)
    equal = summary["receipts"] - summary["different"] - summary["incomparable"]
    about = {"model": options.model.name, "batch": options.batch}
    rates = [round(summary["tokens"] / s, 1) for s in (served.seconds, summary["seconds"])]
    metrics = {"tokens": summary["tokens"], "times": round(rates[1] / rates[0], 2)}
    unit = f"of {served.requests:,} receipts equal"
    rows = [
        {"case": "made under load", **about, "tp": tp, "value": rates[0], "unit": "tokens/s"},
        {"case": f"those of TP {tp} replayed", **about, "tp": 1, "value": rates[1],
         "unit": "tokens/s", "metrics": metrics},
        {"case": f"those of TP {tp} replayed, equal", **about, "tp": 1, "value": equal,
         "unit": unit},
    ]  # fmt: skip
    return rows, equal == served.requests


def main() -> int:
    """Print and record the rows of all sizes; 1 if a receipt is missing or differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("results", type=Path, help="a folder of results files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load-format", default="auto", help="dummy: weights of the seed")
    parser.add_argument("--tp", default="2,4", help="sizes of the servers")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32, help="sequences of the server's steps")
    parser.add_argument("--longer", type=int, default=1, help="times as many tokens at most")
    options = parser.parse_args()
    sizes = [*map(int, options.tp.split(","))]
    proofs = [proved(options, tp) for tp in sizes]
    rows = [row for found, _ in proofs for row in found]
    asked = f"--batch {options.batch} --answers {options.answers} --longer {options.longer}"
    command = f"python -m scripts.replayed_receipts --tp {options.tp} {asked}"
    append_run(options.results, "replay", machine(options.device, max(sizes)), command, rows)
    return int(not all(holds for _, holds in proofs))


if __name__ == "__main__":
    sys.exit(main())
