"""A specialization as plain data, from which another process compiles the very same kernel.

    data = to_plain(specialization)     # what `json` writes and reads back
    again = from_plain(data)            # of the same key in Triton's cache

Functions and named tuples travel by name and are looked up in `tpdet.kernels` alone. JSON's arrays
stand for tuples; of other objects only those are packed that come back as they were.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tpdet.kernels.cuda.compile.recording import Specialization

_PACKAGE = "tpdet.kernels."
_PLAIN = (type(None), bool, int, float, str)


def to_plain(each: Specialization) -> list[Any]:
    """What `from_plain` takes. Raises TypeError for arguments that are no plain data."""
    _, signature, device, constexprs, options, attributes = each.arguments
    target = each.function.device_caches[device][2]
    what = signature, constexprs, vars(options), attributes
    return [
        [target.backend, target.arch, target.warp_size],
        _name_of(each.function),
        *(_pack(part) for part in what),
    ]


def target_of(plain: list[Any]) -> GPUTarget:
    """What a specialization is to be compiled for."""
    return GPUTarget(*plain[0])


class TargetDriver:
    """As much of Triton's driver as compiling takes: `recording.has_gpu` is False with it."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """One for each target: Triton keeps what it compiled by device."""
        return int(self._target.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        """Nothing is launched on it."""
        return 0


def from_plain(plain: list[Any]) -> Specialization:
    """A specialization to compile, not to launch, by a driver of its target.

    Raises ImportError, AttributeError, LookupError, TypeError and ValueError for other data.
    """
    function = _found(plain[1], JITFunction)
    signature, constexprs, options, attributes = (_unpack(part) for part in plain[2:])
    # The first argument says where this process would keep the kernel; it keeps none.
    arguments = "", signature, 0, constexprs, SimpleNamespace(**options), attributes
    return Specialization(function, arguments)


def _name_of(thing: Any) -> list[str]:
    """Module and name. Raises TypeError unless that is where it is found."""
    function = thing.fn if isinstance(thing, JITFunction) else thing
    name = [function.__module__, function.__name__]
    try:
        there = _found(name, object)
    except (ImportError, AttributeError, ValueError):
        there = None
    if there is not thing:
        raise TypeError(f"{'.'.join(name)} cannot be found by its name")
    return name


def _found(name: list[str], kind: type) -> Any:
    module, attribute = name
    if not module.startswith(_PACKAGE):
        raise ValueError(f"{module} is not below {_PACKAGE[:-1]}")
    thing = getattr(import_module(module), attribute)
    if not isinstance(thing, kind):
        raise ValueError(f"{module}.{attribute} is no {kind.__name__}")
    return thing


def _pack(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return [_pack(each) for each in value]
    if kind is list:
        return {"list": [_pack(each) for each in value]}
    if kind is dict:
        return {"dict": [[_pack(key), _pack(each)] for key, each in value.items()]}
    if kind is tl.dtype:
        return {"dtype": value.name}
    if isinstance(value, JITFunction):
        return {"function": _name_of(value)}
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return {"named": _name_of(kind), "fields": [_pack(each) for each in value]}
    raise TypeError(f"{kind.__name__} is no plain data")


def _unpack(data: Any) -> Any:
    match data:
        case list():
            return tuple(_unpack(each) for each in data)
        case {"list": values}:
            return [_unpack(each) for each in values]
        case {"dict": pairs}:
            return {_unpack(key): _unpack(value) for key, value in pairs}
        case {"dtype": name}:
            return tl.dtype(name)
        case {"function": name}:
            return _found(name, JITFunction)
        case {"named": name, "fields": values}:
            return _found(name, type)._make(_unpack(each) for each in values)
        case dict():
            raise ValueError(f"no value is packed as {sorted(data)}")
    return data
