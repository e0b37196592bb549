"""`tpdet serve` on a real model, in real processes: started, asked, broken, and looked after."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import openai
import psutil

from tests.lib.forked import ForkedProgram
from tests.lib.server.harness import eventually
from tpdet.launch.host.interpreter import python_command
from tpdet.launch.life.run_directory import CHANNEL_FILES

STEP_TIMEOUT = 8.0
SHARED_MEMORY = Path("/dev/shm")


class Served:
    """One running `tpdet serve --tp N`; `environment` is added to this process's.

    fresh: all of it in new interpreters, as a user's, rather than in forks.
    """

    def __init__(self, model, folder, tp, *flags, environment=None, fresh=False, cwd=None):
        self.run, self.tp = folder / "run", tp
        self.log = folder / "log"
        self._shared_before = shared_memory()
        words = ["tpdet", "serve", "--tp", str(tp), "--model", str(model)]
        words += ["--run-dir", str(self.run), "--port", "0", "--served-model-name", "tiny"]
        words += ["--step-timeout", str(STEP_TIMEOUT), "--kv-pages", "96", *flags]
        own = {"OMP_NUM_THREADS": "1"} | (environment or {})
        if fresh:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    python_command("-m", *words),
                    stdout=log,
                    stderr=log,
                    cwd=cwd,
                    env=os.environ | own,
                )
        else:  # rank 0 has one child: the HTTP process
            ranks = (((),), *[()] * (tp - 1))
            self.process = ForkedProgram(*words, environment=own, log=self.log, children=ranks)
        try:
            self.wait_ready()
        except BaseException:
            self.process.kill()  # and with it everybody else
            self.process.wait()
            raise
        self.ready = json.loads((self.run / "ready.json").read_text())
        self.url = self.ready["url"] + "/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="none", timeout=120, max_retries=0)
        self.everyone = psutil.Process(self.process.pid).children(recursive=True)

    def wait_ready(self):
        """Until this start takes requests; what an earlier one left in the directory is not it."""
        deadline = time.monotonic() + 120
        while not self.is_ready():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def is_ready(self):
        """Whether ready.json is there and names processes of this start."""
        try:
            ranks = json.loads((self.run / "ready.json").read_text())["ranks"]
        except FileNotFoundError:
            return False
        mine = {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
        return all(rank["pid"] in mine for rank in ranks)

    def pid(self, rank):
        """The process of a rank."""
        return next(r["pid"] for r in self.ready["ranks"] if r["rank"] == rank)

    def http_pid(self):
        """The HTTP process: the first child of rank 0."""
        return psutil.Process(self.pid(0)).children()[0].pid

    def end(self, number=signal.SIGTERM, wait=60.0):
        """Signal the supervisor and wait; the exit code, once nobody and nothing is left."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(wait)
        self.check_nothing_is_left()
        return code

    def check_nothing_is_left(self):
        """No process, shared memory, socket or secret of the server is there any more."""
        _, alive = psutil.wait_procs(self.everyone, timeout=5)
        assert not alive, [p.cmdline() for p in alive]
        eventually(lambda: shared_memory() <= self._shared_before)  # others may be running too
        assert not {path.name for path in self.run.iterdir()} & {*CHANNEL_FILES}

    def kill(self):
        """End everything, whatever state it is in."""
        self.process.kill()
        self.process.wait()
        for process in self.everyone:
            if process.is_running():
                process.kill()


def shared_memory():
    """This user's files in shared memory that nobody but a server would have made."""
    names = re.compile(r"torch_|nccl|psm_|sem\.|tpdet|gloo", re.IGNORECASE)
    mine = (p for p in SHARED_MEMORY.iterdir() if names.match(p.name))
    return {p.name for p in mine if p.exists() and p.stat().st_uid == os.geteuid()}


def streams(served, count, **fields):
    """Open streams; (threads, each one's outcome, each one's token ids so far).

    An outcome is the error that ended the stream, or "completed".
    """
    outcomes, ids = [None] * count, [[] for _ in range(count)]
    started = threading.Barrier(count + 1)
    settings = {"temperature": 0, "max_tokens": 3000} | fields

    def one(index):
        first = True
        try:
            for chunk in served.client.completions.create(
                model="tiny",
                prompt=[5, index],
                stream=True,
                **settings,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            ):
                for choice in chunk.choices:
                    ids[index].extend(choice.token_ids or [])
                if first:
                    started.wait(60)
                    first = False
            outcomes[index] = "completed"
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    started.wait(60)
    return threads, outcomes, ids
