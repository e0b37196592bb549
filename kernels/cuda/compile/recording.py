"""Which kernels a piece of work would launch: it runs, and Triton compiles and launches nothing.

    with recording() as asked:
        warm_up(...)                # what it computes is zeros or garbage: believe none of it
    for each in asked.values(): each.compile()      # in any order, on any thread

Only the thread that entered is concerned, for Triton kernels alone (Gluon's are a kind of them);
torch's operations run. Memory that nobody has written is zero meanwhile, so an index that a kernel
would have computed is one that a torch operation may use. A kernel that is compiled already is not
launched either: one that waits for its peers would wait for ever.

Triton has no interface for this; `run` and `_do_compile` of its JITFunction (3.6 to 3.9) are
replaced while a recording lasts, and `recording` refuses a Triton in which they look different. So
are, for good, what makes a kernel's key depend on which other kernels were asked for before it, and
what gives threads each other's launchers (`launchers.py`).
"""

import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from triton.runtime import build
from triton.runtime.jit import DependenciesFinder, JITFunction

from tpdet.kernels.cuda.compile.launchers import keep_launchers_apart

_RUN = ("self", "args", "grid", "warmup", "kwargs")
_COMPILE = ("self", "key", "signature", "device", "constexprs", "options", "attrs", "warmup")
_HASH, _LOAD = ("self", "func"), ("name", "path")
_MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
_turn = threading.Lock()


@dataclass(frozen=True, eq=False)
class Specialization:
    """A kernel for one kind of arguments; `arguments` are what Triton compiles it from."""

    function: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The kernel's name in its module."""
        return str(self.function.fn.__name__)

    @property
    def size(self) -> int:
        """Characters of its source, without what it calls."""
        return len(self.function.src)

    @property
    def digest(self) -> bytes:
        """32 bytes, equal where source (with what it calls), arguments and options are equal."""
        return hashlib.sha256(f"{self.function.cache_key} {self.arguments[0]}".encode()).digest()

    def compile(self) -> None:
        """Compile, or take from Triton's cache on disk, and keep for launches of this process.

        Raises what the compiler raises.
        """
        kernel = self.function._do_compile(*self.arguments, warmup=True)
        # What a first launch would do, one kernel after the other: load the code to this thread's
        # GPU, and make the host's function that launches it, by a C compiler (Triton 3.6).
        if has_gpu() and kernel is not None:
            _ = kernel.run


class _StandIn:
    """Stands for a kernel that was asked for; it is compiled if another thread launches it."""

    def __init__(self, each: Specialization) -> None:
        self._each = each

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    @cached_property
    def _kernel(self) -> Any:
        return self._each.function._do_compile(*self._each.arguments, warmup=False)


Recorded = dict[bytes, Specialization]
"""Specializations by digest, in the order in which they were first asked for."""


@contextmanager
def _zeroed_workspaces(owner: int) -> Iterator[None]:
    """Tensors that nobody has written hold zeros, where the thread `owner` makes them.

    A mode of torch would be asked at each look at a shape too: a third of a rehearsal's time.
    """
    kept = [(room, name, getattr(room, name), name in vars(room)) for room, name in _MAKERS]
    for room, name, make, _ in kept:
        setattr(room, name, _zeroing(make, owner))
    try:
        yield
    finally:
        for room, name, make, own in kept:
            if own:
                setattr(room, name, make)
            else:  # it is a base's again
                delattr(room, name)


def _zeroing(make: Callable[..., torch.Tensor], owner: int) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return tensor.zero_() if threading.get_ident() == owner else tensor

    return made


@contextmanager
def recording() -> Iterator[Recorded]:
    """Collect what this thread's kernels would need compiled. Recordings take turns.

    Raises RuntimeError for a Triton that cannot be recorded.
    """
    asked: Recorded = {}
    owner = threading.get_ident()
    with _turn:  # what another thread's recording replaced is back
        check_triton()
        hash_callees_first()
        keep_launchers_apart()
        run, compile_now = JITFunction.run, JITFunction._do_compile
        stand_ins: list[tuple[dict[str, Any], str, _StandIn]] = []

        def run_nothing(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            records = threading.get_ident() == owner
            return run(self, *args, grid=grid, warmup=warmup or records, **kwargs)

        def note_or_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                return compile_now(self, *args, **kwargs)
            bound = inspect.signature(compile_now).bind(self, *args, **kwargs).arguments
            each = Specialization(self, tuple(bound[name] for name in _COMPILE[1:-1]))
            stand_in = _StandIn(asked.setdefault(each.digest, each))
            known, key = self.device_caches[bound["device"]][0], bound["key"]
            known[key] = stand_in  # so that it is looked up once
            stand_ins.append((known, key, stand_in))
            return None  # as where Triton's own hook wants nothing compiled

        JITFunction.run, JITFunction._do_compile = run_nothing, note_or_compile
        try:
            with _zeroed_workspaces(owner):
                yield asked
        finally:
            JITFunction.run, JITFunction._do_compile = run, compile_now
            for known, key, stand_in in stand_ins:
                if known.get(key) is stand_in:
                    del known[key]


def has_gpu() -> bool:
    """Whether kernels can be launched: the driver of `tpdet compile` only says what to compile."""
    return hasattr(triton.runtime.driver.active, "launcher_cls")


def hash_callees_first() -> None:
    """Give a function one key, whichever functions were given theirs before it.

    Triton until 3.8 takes over the constants of a function that is called before it has looked for
    them, unless something else had it look; its keys then differ from process to process.
    """
    original = DependenciesFinder._update_hash
    if getattr(original, "callees_first", False):
        return

    def update_hash(self: Any, func: Any) -> None:
        _ = func.cache_key
        original(self, func)

    update_hash.callees_first = True  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = update_hash


def check_triton() -> None:
    """Raise RuntimeError unless Triton's private methods take what is expected of them."""
    expected_members: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
        (JITFunction, "run", _RUN),
        (JITFunction, "_do_compile", _COMPILE),
        (DependenciesFinder, "_update_hash", _HASH),
        (build, "_load_module_from_path", _LOAD),
    )
    for owner, method, expected in expected_members:
        member = getattr(owner, method, None)
        names = tuple(inspect.signature(member).parameters) if callable(member) else ()
        if names != expected:
            raise RuntimeError(f"Triton's {owner.__name__}.{method} takes {names}, not {expected}")
