"""A server in processes of its own, started once for many requests, and what it counts."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from tests.fuzz.models import CONTEXT
from tests.lib.tree import ROOT

_START_SECONDS = 240.0


class Server:
    """`tpdet serve` with some flags; or with a fault of `planted`, then of one rank."""

    def __init__(self, model: Path, folder: Path, tp: int, flags: tuple[str, ...], planted: str):
        folder.mkdir()
        self._run, self._log = folder / "run", folder / "log"
        way = ["tpdet", "serve", "--tp", str(tp)]
        if planted:
            way = ["tests.fuzz.planted", planted]
        command = [sys.executable, "-m", *way, "--model", str(model), "--run-dir", str(self._run)]
        command += ["--port", "0", "--max-model-len", str(CONTEXT), "--step-timeout", "300"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *flags],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        try:
            self._await_start()
        except BaseException:
            self.stop()
            raise

    def _await_start(self) -> None:
        ready, deadline = self._run / "ready.json", time.monotonic() + _START_SECONDS
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {self.log}")
            time.sleep(0.05)
        self.url: str = json.loads(ready.read_text())["url"]

    @property
    def log(self) -> str:
        """The end of what it wrote."""
        return self._log.read_text(errors="replace")[-2000:]

    def count(self, name: str) -> float:
        """The sum of a metric over its labels; `name` may end in some of them."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, lines))

    def await_no_pages(self, seconds: float = 30.0) -> None:
        """Raise RuntimeError unless all pages are given back."""
        deadline = time.monotonic() + seconds
        while self.count('tpdet_kv_pages{state="used"}'):
            if time.monotonic() > deadline:
                raise RuntimeError("pages are in use that nobody reads")
            time.sleep(0.02)

    def stop(self) -> int:
        """End it and all of its processes: the code that it ended with."""
        everyone = [] if self._process.poll() is not None else _below(self._process.pid)
        self._process.terminate()
        try:
            return self._process.wait(60)
        finally:
            self._process.kill()
            for process in everyone:
                if process.is_running():
                    process.kill()
            self._process.wait()


def _below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
