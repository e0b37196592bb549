"""A question asked of a server that a cluster's launcher started, and who is left when it ended."""

import json
import threading
import time
import urllib.request
from pathlib import Path

import psutil

from tests.lib.server.harness import eventually
from tpdet.llm import LLM
from tpdet.requests.request import SamplingParams

QUESTION = {
    "model": "tiny", "prompt": "The for statement", "max_tokens": 12, "temperature": 0.9,
    "seed": 3, "logprobs": 2, "return_token_ids": True,
}  # fmt: skip
LONG = QUESTION | {"max_tokens": 100, "ignore_eos": True}
_NOT_SAMPLED = {"model", "prompt", "return_token_ids"}
FLAGS = ("--served-model-name", "tiny", "--port", "0", "--kv-pages", "16", "--device", "cpu")


def wait_ready(folder: Path, pattern: str, alive, log: Path, seconds: float = 90.0) -> dict:
    """ready.json below `folder`, once it is there; `alive` tells whether its launcher runs."""
    deadline = time.monotonic() + seconds
    while not (found := list(folder.glob(pattern))):
        assert alive() and time.monotonic() < deadline, log.read_text() if log.exists() else "?"
        time.sleep(0.05)
    return json.loads(found[0].read_text())


def ask(url: str, question=QUESTION):
    """The answer's text, ids, bits and end, its fingerprint and digest: equal bit by bit."""
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(question).encode(), {"content-type": "application/json"}
    )
    # No proxy of the environment stands between.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        request, None, 60
    ) as got:
        found = json.load(got)
    (choice,) = found["choices"]
    answer = [choice[name] for name in ("text", "token_ids", "logprob_bits", "finish_reason")]
    return answer, found["system_fingerprint"], found["tpdet"]["replay_digest"]


def ask_here(model: Path, questions) -> list:
    """What a server of one rank answers to each question, by an engine of this process."""
    llm = LLM(str(model), kv_pages=16, device="cpu")
    found = []
    for question in questions:
        fields = {name: question[name] for name in question if name not in _NOT_SAMPLED}
        (output,) = llm.generate([question["prompt"]], SamplingParams(**fields))
        (choice,) = output.outputs
        answer = [choice.text, [*choice.token_ids], [*choice.logprob_bits], choice.finish_reason]
        found.append((answer, llm.system_fingerprint, output.replay_digest))
    llm.close()
    return found


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
