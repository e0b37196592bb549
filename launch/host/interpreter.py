"""Starts Python once more, for a child process that runs no file of the working directory.

`python -m MODULE` puts the working directory first on the path, and `python -c` does too: a
`queue.py` there, of a downloaded model or in a shared /tmp, would run in place of Python's own. So
every child is `python_command(...)` in the environment `python_environment()`.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import tpdet

SAFE_PATH = "PYTHONSAFEPATH"
"""The variable that does in a whole environment what -P does for one Python."""
PYTHON_PATH = "PYTHONPATH"
_ROOT = Path(tpdet.__file__).resolve().parents[1]


def python_command(*arguments: str) -> list[str]:
    """The command of this interpreter with `arguments`, e.g. ("-m", "tpdet.serve")."""
    return [sys.executable, "-P", *arguments]


def python_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """`environ`, this process's if None, for a child that imports this very tpdet."""
    child = dict(os.environ if environ is None else environ)
    guard(child)
    return child


def guard(environ: MutableMapping[str, str]) -> None:
    """Keep the working directory off the path of every Python that is started in `environ`.

    Where this process found tpdet by that very folder (a clone's root, without an installation),
    its absolute path is added to PYTHONPATH, else a child would not find tpdet.
    """
    environ[SAFE_PATH] = "1"
    listed = [path for path in environ.get(PYTHON_PATH, "").split(os.pathsep) if path]
    if any(map(_is_root, sys.path[:1])) and not any(map(_is_root, listed)):
        before = [environ[PYTHON_PATH]] if environ.get(PYTHON_PATH) else []
        environ[PYTHON_PATH] = os.pathsep.join([*before, str(_ROOT)])


def leave_working_directory() -> None:
    """Guard this process, a program of ours, and its children; for a start by `python -m`.

    What was imported before came from there if it is there: only -P and PYTHONSAFEPATH prevent it.
    A folder that holds tpdet itself stays on the path.
    """
    guard(os.environ)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and not sys.flags.safe_path and not any(map(_is_root, sys.path[:1])):
        del sys.path[:1]


def _is_root(path: str) -> bool:
    """Whether `path`, an entry of sys.path, is the folder that holds tpdet."""
    return os.path.realpath(path) == str(_ROOT)


def missing_bytecode(module: str) -> str | None:
    """What to say of an imported module whose bytecode Python did not keep; None if it is kept."""
    spec = sys.modules[module].__spec__
    if spec is None or spec.cached is None or spec.origin is None or os.path.exists(spec.cached):
        return None
    reason = "its folder cannot be written"
    if sys.dont_write_bytecode:
        reason = "PYTHONDONTWRITEBYTECODE is set"
    folder = Path(spec.origin).parent.parent
    return (
        f"Python keeps no bytecode of {module} ({reason}), so each process of a start compiles "
        f"its sources again, for seconds: run {sys.executable} -P -m compileall -q {folder} once"
    )
