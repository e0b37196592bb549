"""Layers that are alike, launched by the Python of two of them: for the capture of a graph.

Gain: KV pages and the 119 graphs of Qwen3-8B take 3.1 s of a start, not 5.9 (an H200).

A layer's launches follow from its kind and from the step's shape. So two turns of layers run as
ever, and their launches are noted (`kernels/cuda/launch/tape.py`). If those differ in weights and
pages alone, the turns behind them are launched from the notes, over their own. What is alike is
read from the layers: their objects are compared, and only tensors and the layer's number may
differ. Where anything else does, layers run as ever; the kernels and their order are the same.

The results of the second turn lie where the first one's input lay. So the third turn is launched as
the first, the fourth as the second, and so on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import gcd
from typing import Any, NamedTuple

import torch

from tpdet.cache.kv import LayerCache
from tpdet.kernels import ops
from tpdet.kernels.inputs.norm import Norm
from tpdet.layers.micro_batch import MicroBatch
from tpdet.models.layer import DecoderLayer

_LONGEST = 8  # layers of a turn: in models with windows, every second or sixth layer differs
_NUMBER = "index"  # of a layer

Pair = tuple[torch.Tensor, torch.Tensor]


class LayerCall(NamedTuple):
    """A layer and what it is called with, beside the rows."""

    layer: DecoderLayer
    following: Norm | None
    rotary: tuple[torch.Tensor, torch.Tensor]
    pages: LayerCache


Run = Callable[[LayerCall], None]
"""Runs a call over the rows, as ever, until its results are there."""


class AlikeLayers:
    """The calls of a model's layers, and which of them follow from others."""

    def __init__(self, calls: Sequence[LayerCall]) -> None:
        """All layers' calls, in order."""
        self._calls = calls
        self._first, self._period, turns = _turns(calls)
        self._weights = self._pairs(0, 1) if turns > 1 else []
        behind = [self._pairs(turn % 2, turn) for turn in range(2, turns)]
        self._others = [{mine.data_ptr(): other for mine, other in pairs} for pairs in behind]
        self._alignment = _alignment(chain.from_iterable(behind))
        self.noted = len(behind) * self._period
        """Layers that are launched from notes."""

    def launch(self, rows: MicroBatch, run: Run) -> None:
        """Launch all layers over rows, in the capture of a graph."""
        for call in self._left(rows, run) if self.noted else self._calls:
            run(call)

    def _left(self, rows: MicroBatch, run: Run) -> Sequence[LayerCall]:
        """Launch layers; those that are to be run behind them."""
        for call in self._calls[: self._first]:
            run(call)
        begin = _results(rows)
        first = self._note(0, rows, run, {})
        numbers = [first.at(each) for each in _results(rows)]
        places = {n: tensor for n, tensor in zip(numbers, begin, strict=True) if n is not None}
        other = self._note(1, rows, run, places)
        left = self._calls[self._first + 2 * self._period :]
        patterns = self._patterns(first, other)
        if patterns is None or _addresses(begin) != _addresses(_results(rows)):
            return left
        for turn, others in enumerate(self._others):
            patterns[turn % 2].launch(others)
        return left[self.noted :]

    def _note(
        self, turn: int, rows: MicroBatch, run: Run, places: Mapping[int, torch.Tensor]
    ) -> Any:
        """Run a turn; the `Tape` of what it launched. places: where results are made."""
        with ops.taping(_results(rows), places) as tape:
            for call in self._turn(turn):
                run(call)
        return tape

    def _patterns(self, mine: Any, other: Any) -> tuple[Any, Any] | None:
        """The patterns of both turns; None unless they differ in weights alone."""
        first = ops.repeated(mine, other, self._weights)
        second = ops.repeated(other, mine, [(theirs, ours) for ours, theirs in self._weights])
        if first is None or second is None or self._alignment % first.alignment:
            return None
        return first, second

    def _turn(self, turn: int) -> Sequence[LayerCall]:
        begin = self._first + turn * self._period
        return self._calls[begin : begin + self._period]

    def _pairs(self, turn: int, other: int) -> list[Pair]:
        """Each tensor of a turn with the one in its place in another turn, which is alike."""
        pairs: list[Pair] = []
        for mine, theirs in zip(self._turn(turn), self._turn(other), strict=True):
            pairs += alike(mine, theirs) or []
        return pairs


def _results(rows: MicroBatch) -> Pair:
    return rows.hidden_MH, rows.x_MH


def _addresses(tensors: Pair) -> list[int]:
    return [each.data_ptr() for each in tensors]


def _turns(calls: Sequence[LayerCall]) -> tuple[int, int, int]:
    """(first, period, turns): calls first + i and first + i + period are alike.

    An even number of turns, by which most calls follow from others; 0 if that spares nothing.
    """
    best, spared = (0, 1, 0), 0
    for period in range(1, min(_LONGEST, len(calls) // 4) + 1):
        if spared >= len(calls) - 2 * period:
            break  # no longer period spares more
        first = len(calls) - period
        while first and alike(calls[first - 1], calls[first - 1 + period]) is not None:
            first -= 1
        turns = (len(calls) - first) // period // 2 * 2
        if (turns - 2) * period > spared:
            best, spared = (first, period, turns), (turns - 2) * period
    return best


def alike(mine: LayerCall, other: LayerCall) -> list[Pair] | None:
    """Each tensor of a call with the other's in its place; None if they differ otherwise."""
    numbers = mine.layer.index, other.layer.index
    try:
        return [*_parts(mine, other, numbers)]
    except _UnlikeError:
        return None


class _UnlikeError(Exception):
    """Two calls differ in more than tensors' values."""


def _parts(mine: Any, other: Any, numbers: tuple[int, int]) -> Iterator[Pair]:
    """Pairs of tensors in two objects. Raises _UnlikeError."""
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        if _form(mine) != _form(other):
            raise _UnlikeError
        yield mine, other
    elif mine is other:
        return  # a tensor in it is the same for both
    elif type(mine) is not type(other):
        raise _UnlikeError
    elif isinstance(mine, str):
        if _unnumbered(mine, numbers[0]) != _unnumbered(other, numbers[1]):
            raise _UnlikeError
    elif isinstance(mine, list | tuple):
        if len(mine) != len(other):
            raise _UnlikeError
        for pair in zip(mine, other, strict=True):
            yield from _parts(*pair, numbers)
    elif isinstance(mine, dict):
        if list(mine) != list(other):
            raise _UnlikeError
        for name in mine:
            yield from _parts(mine[name], other[name], numbers)
    elif isinstance(mine, DecoderLayer):
        both = mine, other
        of = ({name: it for name, it in vars(each).items() if name != _NUMBER} for each in both)
        yield from _parts(next(of), next(of), numbers)
    elif getattr(mine, "__dict__", None):
        yield from _parts(vars(mine), vars(other), numbers)
    elif mine != other:
        raise _UnlikeError


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _unnumbered(name: str, number: int) -> str:
    """A tensor's name in a checkpoint without the layer's number."""
    return name.replace(f"layers.{number}.", "layers.*.")


def _alignment(pairs: Iterable[Pair]) -> int:
    """What divides the distance of both tensors of each pair, at most; 0 if it is always 0."""
    return gcd(*(other.data_ptr() - mine.data_ptr() for mine, other in pairs))
