"""Launches of a piece of work, made again for other weights without the work's Python.

Gain: KV pages and the 119 graphs of Qwen3-8B take 3.1 s of a start, not 5.9 (an H200).

    with taping(x0) as first: x1 = run(layer 0, x0)              # two layers that are alike
    with taping(x1, {first.at(x1): x0}) as second: run(layer 1, x1)    # its result lies at x0
    pattern = Pattern.of(first, second, weights)     # None: the two differ in more than weights
    pattern.launch(weights of layer 2)               # the kernels of layer 0, over other weights

A tape holds addresses and no tensors, so memory that the work had for a while is given back. It is
for the capture of a graph, in whose memory nothing else is made meanwhile.

Nothing is assumed of the work: whatever is no launch of Triton's, no product of the library and no
view refuses the tape, and each pointer must be explained. It lies in a weight, in memory that this
very work made, or it is the same in both. Of Triton one member is replaced: the launches are seen
where its compiled kernel is run (`CompiledKernel.run`, 3.6 to 3.9), with all that was decided for
them, dependent launches too.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any, NamedTuple

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


class Pointer(int):
    """An address that a launch was given."""

    def data_ptr(self) -> int:
        """The address, for a tensor descriptor, whose base it is."""
        return int(self)


@dataclass(frozen=True)
class _InWeight:
    """What lies in the weight at `weight`, `offset` bytes behind its beginning.

    like: the view of the weight that a product of the library was given; None for an address.
    """

    weight: int
    offset: int
    like: torch.Tensor | None = None

    def of(self, others: Mapping[int, torch.Tensor]) -> Any:
        """The same of the weight that stands for this one; of itself where none does."""
        other = others.get(self.weight)
        if self.like is None:
            return Pointer((self.weight if other is None else other.data_ptr()) + self.offset)
        if other is None:
            return self.like
        begin = other.storage_offset() + self.offset // other.element_size()
        return other.as_strided(self.like.shape, self.like.stride(), begin)


@dataclass(frozen=True)
class _Entry:
    """A launch of Triton's, with a `Pointer` for each tensor; or a product of the library.

    A product keeps its tensors, as few rows are multiplied so.
    """

    kind: tuple[Any, ...]
    """What is equal in two entries that differ in addresses alone."""
    arguments: tuple[Any, ...]
    make: Callable[[Sequence[Any], int], object]
    """Makes it again, with arguments, on a stream; a product to the same memory."""
    alignment: int
    """Bytes to which other weights must be aligned as those are for which it was chosen."""


@dataclass
class Tape:
    """What a piece of work launched, in order, and the memory that it made."""

    entries: list[_Entry] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)
    """Address and bytes, in the order in which tensors were made."""
    inputs: tuple[torch.Tensor, ...] = ()
    """What the work was given beside its weights."""
    refused: str = ""
    """Why it cannot be made again, if it cannot."""

    def at(self, tensor: torch.Tensor) -> int | None:
        """Which of the tensors that were made holds this one, counted from 0; the last of them."""
        memory = tensor.data_ptr(), tensor.nbytes
        numbers = [number for number, made in enumerate(self.made) if made == memory]
        return numbers[-1] if numbers and tensor.is_contiguous() else None

    def explains(self, address: int) -> bool:
        """Whether the work made the memory there, or was given it."""
        inputs = [(tensor.data_ptr(), tensor.nbytes) for tensor in self.inputs]
        return any(begin <= address < begin + size for begin, size in (*inputs, *self.made))


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
            tape.entries.append(_product(_PRODUCTS[func], args, kwargs, made))
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
    inputs: tuple[torch.Tensor, ...], places: Mapping[int, torch.Tensor] | None = None
) -> Iterator[Tape]:
    """Note what this thread launches, with tensors that its work takes.

    places: where tensors are made, by their number among those that are (`Tape.at`).
    """
    tape, owner = Tape(inputs=inputs), threading.get_ident()
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

    def launch(*launched: Any) -> None:
        launcher(*launched)
        x, y, z, _, function, packed, _, *hooks = launched[:9]
        if any(getattr(hook, "calls", hook) for hook in hooks):
            tape.refused = "hooks of launches"  # of a profiler: each launch is to be seen
        kind = launcher, x, y, z, function, packed
        arguments = tuple(_changed(value, _address) for value in launched[9:])

        def make(others: Sequence[Any], stream: int) -> None:
            launcher(x, y, z, stream, function, packed, None, None, None, *others)

        tape.entries.append(_Entry(kind, arguments, make, _LAUNCH_ALIGNMENT))

    return launch


def _product(
    write: Callable[..., object], operands: tuple[Any, ...], more: Any, result: torch.Tensor
) -> _Entry:
    def make(others: Sequence[Any], _: int) -> None:
        write(*others, **more, out=result)

    return _Entry((write, more), operands, make, _PRODUCT_ALIGNMENT)


def _address(value: Any) -> Any:
    return Pointer(value.data_ptr()) if isinstance(value, torch.Tensor) else value


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument with each of its parts changed: those of a tuple, the base of a descriptor."""
    if isinstance(value, tuple):
        return _like(value, [_changed(part, change) for part in value])
    if _is_descriptor(value):
        return _based(value, change(value.base))
    return change(value)


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


class _PatternStep(NamedTuple):
    """An entry of a pattern, and which of its arguments lie in weights."""

    entry: _Entry
    arguments: tuple[Any, ...]
    in_weights: tuple[int, ...]


class Pattern:
    """Launches that are made again over other weights."""

    def __init__(self, steps: Sequence[_PatternStep]) -> None:
        self._steps = steps
        self.alignment = max((step.entry.alignment for step in steps), default=_LAUNCH_ALIGNMENT)
        """The largest of its entries'."""

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

        def of_other(part: Any) -> Any:
            return part.of(others) if isinstance(part, _InWeight) else part

        for step in self._steps:
            arguments = [*step.arguments]
            for index in step.in_weights:
                arguments[index] = _changed(arguments[index], of_other)
            step.entry.make(arguments, stream)


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
        self._in_weights = 0  # parts of arguments so far that lie in weights

    def step(self, mine: _Entry, other: _Entry) -> _PatternStep:
        """An entry of both, with the first one's arguments. Raises _DifferError."""
        if mine.kind != other.kind or len(mine.arguments) != len(other.arguments):
            raise _DifferError
        arguments, in_weights = [], []
        for index, pair in enumerate(zip(mine.arguments, other.arguments, strict=True)):
            before = self._in_weights
            arguments.append(self._argument(*pair))
            if self._in_weights > before:
                in_weights.append(index)
        return _PatternStep(mine, tuple(arguments), tuple(in_weights))

    def _argument(self, mine: Any, other: Any) -> Any:
        """The first one's argument; what lies in a weight as `_InWeight`."""
        if type(mine) is not type(other):
            raise _DifferError
        if isinstance(mine, tuple):
            if len(mine) != len(other):
                raise _DifferError
            return _like(mine, [self._argument(*pair) for pair in zip(mine, other, strict=True)])
        if _is_descriptor(mine):
            if _based(mine, None) != _based(other, None):
                raise _DifferError
            return _based(mine, self._argument(mine.base, other.base))
        if isinstance(mine, Pointer):
            return self._place(mine, other)
        if isinstance(mine, torch.Tensor):
            if _form(mine) != _form(other):
                raise _DifferError
            return self._place(mine.data_ptr(), other.data_ptr(), mine)
        if mine is not other and not bool(mine == other):
            raise _DifferError
        return mine

    def _place(self, mine: int, other: int, tensor: torch.Tensor | None = None) -> Any:
        """Where two addresses lie: in a weight, or (the first one, or its tensor) elsewhere."""
        for first, second, size in self._weights:
            if first <= mine < first + size:
                if other - second != mine - first:
                    raise _DifferError
                self._in_weights += 1
                return _InWeight(first, mine - first, tensor)
        known = self._first.explains(mine) and self._second.explains(other)
        if mine != other and not known:
            raise _DifferError
        return mine if tensor is None else tensor


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
