"""A question asked of a server that a cluster's launcher started, and who is left when it ended."""

import json
import threading
import time
import urllib.request
from pathlib import Path

import psutil

from tests.lib.server.harness import eventually

QUESTION = {
    "model": "tiny", "prompt": "The for statement", "max_tokens": 12, "temperature": 0.9,
    "seed": 3, "logprobs": 2, "return_token_ids": True,
}  # fmt: skip
LONG = QUESTION | {"max_tokens": 150, "ignore_eos": True}
FLAGS = ("--served-model-name", "tiny", "--port", "0", "--kv-pages", "16", "--device", "cpu")


def wait_ready(folder: Path, pattern: str, alive, log: Path, seconds: float = 90.0) -> dict:
    """ready.json below `folder`, once it is there; `alive` tells whether its launcher runs."""
    deadline = time.monotonic() + seconds
    while not (found := list(folder.glob(pattern))):
        assert alive() and time.monotonic() < deadline, log.read_text() if log.exists() else "?"
        time.sleep(0.05)
    return json.loads(found[0].read_text())


def ask(url: str, question=QUESTION):
    """The answer's choices, fingerprint and replay digest: what has to be equal bit by bit."""
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(question).encode(), {"content-type": "application/json"}
    )
    # No proxy of the environment stands between.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        request, None, 60
    ) as got:
        found = json.load(got)
    return found["choices"], found["system_fingerprint"], found["tpdet"]["replay_digest"]


def family(folder: Path) -> list[psutil.Process]:
    """The ranks that registered below `folder`, and everybody they started."""
    records = [json.loads(path.read_text()) for path in folder.glob("**/ranks/*.json")]
    ranks = [psutil.Process(record["pid"]) for record in records]
    return ranks + [child for rank in ranks for child in rank.children(recursive=True)]


def all_gone(everyone: list[psutil.Process], seconds: float = 10.0) -> bool:
    """Whether all have ended, within a time."""
    return not psutil.wait_procs(everyone, timeout=seconds)[1]


class Asking:
    """A long question in flight; made once the server computes it."""

    def __init__(self, url: str) -> None:
        self.answer = None
        self._thread = threading.Thread(target=self._ask, args=(url,), daemon=True)
        self._thread.start()
        eventually(lambda: _running(url) == 1.0, 20)

    def _ask(self, url: str) -> None:
        self.answer = ask(url, LONG)

    def result(self):
        """The answer, or None if there was none."""
        self._thread.join(60)
        return self.answer


def _running(url: str) -> float:
    with _opener().open(url + "/metrics", None, 10) as got:
        for line in got.read().decode().splitlines():
            if line.startswith("tpdet_requests_running "):
                return float(line.split()[-1])
    return 0.0


def _opener():
    """No proxy of the environment stands between."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))
