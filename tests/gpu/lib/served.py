"""`tpdet serve` in processes of its own, for programs that send it weights."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tpdet.launch.host.interpreter import python_command


@contextmanager
def served(
    model: Path, folder: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[dict]:
    """What `ready.json` says of a server of `model`, called m, with an admin listener.

    folder: gets its run directory. environment: variables beside this process's. Senders of
    weights are expected on this host. Raises RuntimeError if it ends before it is ready.
    """
    command = python_command("-m", "tpdet", "serve", "--model", str(model), "--port", "0", *flags)
    command += ["--served-model-name", "m", "--run-dir", str(folder / "run")]
    command += ["--admin-listen", "127.0.0.1:0", "--weights-peers", "127.0.0.1"]
    server = subprocess.Popen(command, env=os.environ | dict(environment or {}))
    try:
        ready = folder / "run" / "ready.json"
        while not ready.exists():
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}")
            time.sleep(0.1)
        yield json.loads(ready.read_text())
    finally:
        server.terminate()
        server.wait(60)
