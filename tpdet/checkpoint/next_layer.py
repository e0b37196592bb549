"""Reads the next layer's tensors while a layer's are placed.

It is a guess: a layer's tensors are those of the layer before, one number on.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

from tpdet.checkpoint.pieces import PieceRead, TensorRead

Part = tuple[torch.Tensor, bytes]
"""A piece where it is used, and its digest."""
_Piece = TypeVar("_Piece")

_LAYER = re.compile(r"(.*?\.layers\.)(\d+)(\..*)")
_JOB_BYTES = 16 << 20
"""A thread reads pieces of this many bytes, or one that is larger, before it is asked again."""


class Begun(NamedTuple):
    """A piece that a job has begun to read: it is the job's `place`-th."""

    job: Future[list[Part]]
    place: int

    def part(self) -> Part:
        """Wait for the job; raises what it raised."""
        return self.job.result()[self.place]


class NextLayer:
    """Pieces of the next layer that threads read already."""

    def __init__(
        self, threads: ThreadPoolExecutor, has: Callable[[str, tuple[int, ...]], bool]
    ) -> None:
        """has: whether there is a tensor of this name and shape."""
        self._threads, self._has = threads, has
        self._begun: dict[str, tuple[TensorRead, list[Begun]]] = {}

    def begin(self, reads: Iterable[TensorRead], read_piece: Callable[[PieceRead], Part]) -> None:
        """Begin to read the next layer's tensors like these, if there are any."""
        guessed: list[PieceRead] = []
        for read in reads:
            name = _in_next_layer(read.name)
            if name is not None and self._has(name, read.shape):
                following = read._replace(name=name)
                guessed += following.each()
                self._begun[name] = following, []
        for pieces in in_jobs(guessed, [piece.size for piece in guessed]):
            job = self._threads.submit(_read_job, read_piece, pieces)
            for place, piece in enumerate(pieces):
                self._begun[piece.tensor.name][1].append(Begun(job, place))

    def take(self, read: TensorRead) -> list[Begun] | None:
        """The pieces of a tensor; None unless it is read as was guessed. They are forgotten."""
        found, begun = self._begun.pop(read.name, (None, None))
        return begun if found == read else None

    def cancel(self) -> None:
        """Forget all, and begin no job that still waits."""
        for _, parts in self._begun.values():
            for begun in parts:
                begun.job.cancel()
        self._begun.clear()


def _read_job(read_piece: Callable[[PieceRead], Part], pieces: list[PieceRead]) -> list[Part]:
    return [read_piece(piece) for piece in pieces]


def in_jobs(pieces: list[_Piece], sizes: list[int]) -> Iterator[list[_Piece]]:
    """Neighbours together up to _JOB_BYTES: asking a thread for a small one costs more than it."""
    job: list[_Piece] = []
    held = 0
    for piece, size in zip(pieces, sizes, strict=True):
        job.append(piece)
        held += size
        if held >= _JOB_BYTES:
            yield job
            job, held = [], 0
    if job:
        yield job


def _in_next_layer(name: str) -> str | None:
    """The name of the same tensor in the next layer; None for a tensor of no layer."""
    found = _LAYER.fullmatch(name)
    return f"{found[1]}{int(found[2]) + 1}{found[3]}" if found else None
