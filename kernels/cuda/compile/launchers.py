"""Functions of the host that launch kernels, each its own on whichever threads they are made.

Triton until 3.8 compiles a C module for each form of arguments, all of one name. Python has one
object for such modules: a module that is loaded again is this object, with the functions of the one
that was loaded last. So threads that make launchers at once were given each other's, which take
other arguments.
"""

import threading
from types import SimpleNamespace
from typing import Any

from triton.runtime import build

_turn = threading.Lock()


def keep_launchers_apart() -> None:
    """Let Triton load its C modules one at a time, each to an object of its own; for good."""
    load: Any = build._load_module_from_path
    if hasattr(load, "apart"):
        return

    def load_apart(name: str, path: str) -> SimpleNamespace:
        with _turn:
            return SimpleNamespace(**vars(load(name, path)))

    load_apart.apart = True  # type: ignore[attr-defined]
    build._load_module_from_path = load_apart
