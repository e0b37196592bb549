"""How many GPUs torch will see, without importing torch, which takes seconds.

A separate process (`python -m tpdet.server.commands.gpus`) asks the driver, because whoever asks it
keeps its devices open.
"""

import ctypes
import importlib.metadata
import importlib.util
import re
import subprocess
from pathlib import Path

from tpdet.launch.host.interpreter import python_command, python_environment

_ASK_SECONDS = 60.0


def torch_build() -> tuple[str, bool]:
    """torch's version, and whether it is built with CUDA; ("", False) without torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "", False
    version = importlib.metadata.version("torch")
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return version, not version.endswith("+cpu")
    return version, re.search(r"^cuda\b[^=]*=\s*['\"]\d", text, re.MULTILINE) is not None


def count_gpus() -> int | None:
    """GPUs that CUDA gives a process with this environment; None if unknown."""
    try:
        asked = subprocess.run(
            python_command("-m", __name__),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_SECONDS,
            env=python_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = asked.stdout.strip()
    return int(text) if asked.returncode == 0 and text.isdigit() else None


def main() -> None:
    """Print the driver's number of GPUs, 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        print(0)
        return
    count = ctypes.c_int(0)
    ready = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    print(count.value if ready else 0)


if __name__ == "__main__":
    main()
