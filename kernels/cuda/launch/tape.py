"""Launches of a piece of work, kept to be made again for other weights without the work's Python.

    with taping(x0) as first: x1 = run(layer 0, x0)              # two layers that are alike
    with taping(x1, {first.at(x1): x0}) as second: run(layer 1, x1)    # its result lies at x0
    pattern = Pattern.of(first, second, weights)     # None: the two differ in more than weights
    pattern.launch(weights of layer 2)               # the kernels of layer 0, over other weights

A tape holds addresses and no tensors, so memory that the work had for a while is given back. It is
for the capture of a graph, in whose memory nothing else is made meanwhile.

Nothing is assumed of the work: whatever is no launch of Triton's, no product of the library and no
view refuses the tape, and each pointer must be explained. It lies in a weight, in memory that this
very work made, or it is the same in both. Triton's launches are seen where its compiled kernel is
run (`CompiledKernel.run`, 3.6 to 3.9), with all that was decided for them: dependent launches too.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

_LAUNCH_ALIGNMENT = 16  # bytes that Triton specialises kernels on
_PRODUCT_ALIGNMENT = 256  # with which the library's products were tried
_aten = torch.ops.aten
_MAKERS = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)
_PRODUCTS = {
    _aten.mm.default: _aten.mm.out,
    _aten.mm.dtype: _aten.mm.dtype_out,
    _aten.addmm.default: _aten.addmm.out,
}
"""Products of the library, and how each is written to memory that is there."""


@dataclass(frozen=True)
class Pointer:
    """An address that a launch was given."""

    at: int

    def data_ptr(self) -> int:
        """For a tensor descriptor, whose base it is."""
        return self.at


@dataclass(frozen=True)
class _InWeight:
    """A place in the tensor at `at`, `offset` bytes behind its beginning."""

    at: int
    offset: int


@dataclass(frozen=True)
class _Launch:
    """What Triton's launcher is called with; tensors in `arguments` are a `Pointer` each."""

    launcher: Callable[..., None]
    grid: tuple[int, ...]
    function: Any
    packed: Any
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Product:
    """A product of the library; tensors are kept, as few rows are multiplied so."""

    write: Callable[..., torch.Tensor]
    operands: tuple[Any, ...]
    more: Mapping[str, Any]
    result: torch.Tensor


@dataclass
class Tape:
    """What a piece of work launched, in order, and the memory that it made."""

    entries: list[_Launch | _Product] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)
    """Address and bytes, in the order in which tensors were made."""
    given: tuple[torch.Tensor, ...] = ()
    """What the work was given beside its weights."""
    refused: str = ""
    """Why it cannot be made again, if it cannot."""

    def at(self, tensor: torch.Tensor) -> int | None:
        """Which of the tensors that were made holds this one, counted from 0; the last of them."""
        of = tensor.data_ptr(), tensor.nbytes
        found = [number for number, made in enumerate(self.made) if made == of]
        return found[-1] if found and tensor.is_contiguous() else None

    def explains(self, address: int) -> bool:
        """Whether the work made the memory there, or was given it."""
        given = [(each.data_ptr(), each.nbytes) for each in self.given]
        return any(begin <= address < begin + size for begin, size in (*given, *self.made))


class _Noting(TorchDispatchMode):
    """Torch's operations of a piece of work; some of its tensors are made where they are wanted."""

    def __init__(self, tape: Tape, places: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._tape, self._places = tape, places

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run it, and note what it means for the tape."""
        tape, kwargs = self._tape, kwargs or {}
        made = func(*args, **kwargs) if func not in _MAKERS else self._make(func, args, kwargs)
        if func in _PRODUCTS:
            tape.entries.append(_Product(_PRODUCTS[func], args, kwargs, made))
        elif func not in _MAKERS:
            if not func.is_view:
                tape.refused = tape.refused or str(func)
            return made
        tape.made.append((made.data_ptr(), made.nbytes))
        return made

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor:
        place = self._places.get(len(self._tape.made))
        made: torch.Tensor = func(*args, **kwargs)
        if place is None:
            return made
        if (made.shape, made.dtype, made.stride()) != (place.shape, place.dtype, place.stride()):
            self._tape.refused = f"{tuple(made.shape)} {made.dtype} where {place.dtype} was to be"
            return made
        return place.detach()


# Torch wraps the method so that its compiler leaves it alone, and the wrapper's first call imports
# that compiler, which takes seconds. Nothing here is compiled by it.
_Noting.__torch_dispatch__ = unwrap(_Noting.__torch_dispatch__)  # type: ignore[method-assign]


@contextmanager
def taping(
    given: tuple[torch.Tensor, ...], places: Mapping[int, torch.Tensor] | None = None
) -> Iterator[Tape]:
    """Note what this thread launches, with tensors that it was given.

    places: where tensors are made, by their number among those that are (`Tape.at`).
    """
    tape, owner = Tape(given=given), threading.get_ident()
    before = CompiledKernel.__dict__["run"]

    def run(self: Any) -> Callable[..., None]:
        launcher: Callable[..., None] = before.fget(self)
        return _noted(tape, launcher) if threading.get_ident() == owner else launcher

    CompiledKernel.run = property(run)
    try:
        with _Noting(tape, places or {}):
            yield tape
    finally:
        CompiledKernel.run = before


def _noted(tape: Tape, launcher: Callable[..., None]) -> Callable[..., None]:
    """The launcher, which notes on the tape what it is called with."""

    def launch(*of: Any) -> None:
        launcher(*of)
        x, y, z, _, function, packed, _, *hooks = of[:9]
        if any(getattr(hook, "calls", hook) for hook in hooks):
            tape.refused = "hooks of launches"  # of a profiler: each launch is to be seen
        given = tuple(_addressed(each) for each in of[9:])
        tape.entries.append(_Launch(launcher, (x, y, z), function, packed, given))

    return launch


def _addressed(value: Any) -> Any:
    """An argument without tensors: addresses in their place."""
    if isinstance(value, torch.Tensor):
        return Pointer(value.data_ptr())
    if isinstance(value, tuple):
        return _like(value, [_addressed(each) for each in value])
    if _is_descriptor(value):
        return _based(value, Pointer(value.base.data_ptr()))
    return value


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "block_shape") and hasattr(value, "base")


def _based(descriptor: Any, base: Any) -> Any:
    """The same descriptor over another address."""
    other = copy(descriptor)
    other.base = base
    return other


def _like(value: tuple[Any, ...], parts: list[Any]) -> Any:
    """A tuple of the same kind: named, if `value` is."""
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


@dataclass(frozen=True)
class _Step:
    """A launch or a product of a pattern, and which of its arguments lie in weights."""

    entry: _Launch | _Product
    arguments: tuple[Any, ...]
    in_weights: tuple[int, ...]


class Pattern:
    """Launches that are made again over other weights."""

    def __init__(self, steps: Sequence[_Step]) -> None:
        self._steps = steps
        products = any(isinstance(step.entry, _Product) for step in steps)
        self.alignment = _PRODUCT_ALIGNMENT if products else _LAUNCH_ALIGNMENT
        """Bytes to which other weights must be aligned as those are for which it was chosen."""

    @staticmethod
    def of(
        first: Tape, second: Tape, weights: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> "Pattern | None":
        """The launches of `first`; None unless `second` made them too, over its own weights.

        weights: each tensor of the first work, with the one that the second has in its place.
        """
        if first.refused or second.refused or len(first.entries) != len(second.entries):
            return None
        match = _Match(first, second, weights)
        try:
            pairs = zip(first.entries, second.entries, strict=True)
            return Pattern([match.step(*pair) for pair in pairs])
        except _DifferError:
            return None

    def launch(self, others: Mapping[int, torch.Tensor]) -> None:
        """Make the launches; others: what stands for a weight, by the weight's address."""
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        for step in self._steps:
            arguments, entry = [*step.arguments], step.entry
            for index in step.in_weights:
                arguments[index] = _placed(arguments[index], others)
            if isinstance(entry, _Product):
                entry.write(*arguments, **entry.more, out=entry.result)
            else:
                before = stream, entry.function, entry.packed, None, None, None
                entry.launcher(*entry.grid, *before, *arguments)


class _DifferError(Exception):
    """Two works differ in more than their weights."""


class _Match:
    """Compares two tapes, entry by entry."""

    def __init__(
        self, first: Tape, second: Tape, weights: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._first, self._second = first, second
        self._weights = [
            (mine.data_ptr(), other.data_ptr(), mine.nbytes)
            for mine, other in weights
            if mine.nbytes
        ]

    def step(self, mine: _Launch | _Product, other: _Launch | _Product) -> _Step:
        """An entry of both, with the first one's arguments. Raises _DifferError."""
        if isinstance(mine, _Product) and isinstance(other, _Product):
            if mine.write is not other.write or mine.more != other.more:
                raise _DifferError
            arguments = self._all(mine.operands, other.operands)
        elif isinstance(mine, _Launch) and isinstance(other, _Launch):
            for name in ("launcher", "grid", "function", "packed"):
                if getattr(mine, name) != getattr(other, name):
                    raise _DifferError
            arguments = self._all(mine.arguments, other.arguments)
        else:
            raise _DifferError
        in_weights = tuple(i for i, each in enumerate(arguments) if _has_weight(each))
        plain = tuple(
            each if i in in_weights else _placed(each, {}) for i, each in enumerate(arguments)
        )
        return _Step(mine, plain, in_weights)

    def _all(self, mine: tuple[Any, ...], other: tuple[Any, ...]) -> list[Any]:
        if len(mine) != len(other):
            raise _DifferError
        return [self._argument(*pair) for pair in zip(mine, other, strict=True)]

    def _argument(self, mine: Any, other: Any) -> Any:
        """The first one's argument; a pointer into a weight as `_InWeight`."""
        if type(mine) is not type(other):
            raise _DifferError
        if isinstance(mine, Pointer):
            return self._pointer(mine, other)
        if isinstance(mine, torch.Tensor):
            if (mine.shape, mine.stride(), mine.dtype) != (
                other.shape,
                other.stride(),
                other.dtype,
            ):
                raise _DifferError
            place = self._pointer(Pointer(mine.data_ptr()), Pointer(other.data_ptr()))
            return (mine, place) if isinstance(place, _InWeight) else mine
        if isinstance(mine, tuple):
            return _like(mine, self._all(mine, other))
        if _is_descriptor(mine):
            base = self._pointer(mine.base, other.base)
            if _based(mine, None) != _based(other, None):
                raise _DifferError
            return _based(mine, base)
        if mine is not other and not bool(mine == other):
            raise _DifferError
        return mine

    def _pointer(self, mine: Pointer, other: Pointer) -> Pointer | _InWeight:
        for first, second, size in self._weights:
            if first <= mine.at < first + size:
                if other.at - second != mine.at - first:
                    raise _DifferError
                return _InWeight(first, mine.at - first)
        known = self._first.explains(mine.at) and self._second.explains(other.at)
        if mine.at != other.at and not known:
            raise _DifferError
        return mine


def _has_weight(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_weight, value))
    return isinstance(getattr(value, "base", value), _InWeight)


def _placed(value: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """An argument as it is launched with: addresses are numbers, weights the ones in `others`."""
    if isinstance(value, _InWeight):
        other = others.get(value.at)  # None: of both layers, one object holds it
        return (value.at if other is None else other.data_ptr()) + value.offset
    if isinstance(value, Pointer):
        return value.at
    if isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[0], torch.Tensor):
            other = others.get(value[1].at)
            return value[0] if other is None else _view_of(other, value[0], value[1].offset)
        return _like(value, [_placed(each, others) for each in value])
    if _is_descriptor(value) and isinstance(value.base, _InWeight):
        return _based(value, Pointer(_placed(value.base, others)))
    return value


def _view_of(weight: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """What `like` is to its weight, of another weight."""
    begin = weight.storage_offset() + offset // weight.element_size()
    return weight.as_strided(like.shape, like.stride(), begin)
