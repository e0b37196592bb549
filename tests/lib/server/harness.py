"""Starts `tpdet.serve` on a FakeEngine in real processes, and speaks raw HTTP to it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.lib.forked import ForkedProgram
from tests.lib.tree import ROOT

MODEL = "demo"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def write_tokenizer(directory: Path, bos: bool = False, marks: Sequence[str] = ()) -> None:
    """A byte tokenizer: id b is byte b; ids 256 to 258 are special. bos: 256 precedes a text.

    marks: further added tokens from id 259 on, special where they begin with <|.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    for offset, byte in enumerate(b for b in range(256) if b not in letters):
        letters[byte] = chr(256 + offset)
    tokenizer = Tokenizer(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    for mark in marks:
        special = mark.startswith("<|")
        tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 256)]
        )
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": SPECIAL[2],
                "chat_template": TEMPLATE,
                "add_bos_token": False,
            }
        )
    )
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 258, "vocab_size": 512}))


class Server:
    """One server, ready.

    `limits` override those of `tpdet.requests.body.limits` inside it, `options` its engine;
    `stderr` is a descriptor in place of the log file.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        limits: dict | None = None,
        wait: bool = True,
        stderr: int | None = None,
        environment: dict[str, str] | None = None,
        bos: bool = False,
        marks: Sequence[str] = (),
        **options: int,
    ):
        self.run = folder / "run"
        self.model = folder / "model"
        write_tokenizer(self.model, bos, marks)
        words = ["tests.lib.server.fake_rank", "--model", str(self.model)]
        words += ["--run-dir", str(self.run), "--served-model-name", MODEL]
        words += [*(["--port", "0"] if "--port" not in flags else []), *flags]
        self.log = folder / "log"
        own = {"TPDET_TEST": json.dumps({"limits": limits or {}} | options)} | (environment or {})
        if environment or stderr is not None:
            self.process = self._interpreter(words, own, stderr)
        else:
            self.process = ForkedProgram(*words, environment=own, log=self.log, children=((),))
        if wait:
            self.wait_ready()

    def _interpreter(self, words, environment, stderr: int | None) -> subprocess.Popen:
        """A new one: /proc has its environment."""
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                env=os.environ | environment,
                stderr=log if stderr is None else stderr,
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        ready = self.run / "ready.json"
        while not ready.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        self.ready = json.loads(ready.read_text())
        self.url = self.ready["url"]
        self.port = int(self.url.rsplit(":", 1)[1])
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.children = psutil.Process(self.process.pid).children()
        self.child = self.children[0]

    def complete(self, **fields) -> httpx.Response:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4} | fields
        return self.http.post("/v1/completions", json=body)

    def canary(self) -> bytes:
        """An answer whose bytes never change; the id and the time apart."""
        found = self.complete(seed=7, logprobs=2, return_token_ids=True)
        assert found.status_code == 200, found.text
        return json.dumps(found.json()["choices"]).encode()

    def metric(self, name: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        raise KeyError(name)

    def raw(self, data: bytes, wait: float = 10.0) -> bytes:
        """Send bytes, read until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as connection:
            connection.sendall(data)
            return read_all(connection)

    def stop(self, timeout: float = 60.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()
            self.process.wait()


def refused(found, status: int, param: str | None = None) -> dict:
    """The error that an answer holds, in the one form of errors."""
    assert found.status_code == status, found.text
    assert found.headers["x-request-id"] and len(found.content) <= 4096
    error = found.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param, error
    return error


def read_all(connection: socket.socket) -> bytes:
    found = b""
    while chunk := connection.recv(65536):
        found += chunk
    return found


def request_bytes(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def eventually(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
