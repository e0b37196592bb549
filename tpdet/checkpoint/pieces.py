"""The division of a tensor along one dimension, independent of the number of ranks."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple


@dataclass(frozen=True)
class Pieces:
    """The pieces of a tensor, the same at every tensor-parallel size, and this rank's share.

    Piece i is the range `bounds[i]` along `dim`; pieces are contiguous and ascending. This rank
    reads the neighbouring pieces `mine`. Several ranks may read one piece, such as a norm. kept:
    of each piece read, the elements along `dim` that are used here; None for all. exact: whether
    elements stay fp32, whatever the model's dtype.
    """

    dim: int
    bounds: tuple[tuple[int, int], ...]
    mine: range
    kept: range | None = None
    exact: bool = False

    @classmethod
    def whole(cls, kept: range | None = None, exact: bool = False) -> "Pieces":
        """One piece, the whole tensor, which every rank reads; its bound comes from the shape."""
        return cls(0, (), range(0, 1), kept, exact)


class TensorRead(NamedTuple):
    """A tensor of which this rank reads pieces; `shape` is that of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    pieces: Pieces

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of what this rank uses of it; raises as `each`."""
        return self.cut(sum(piece.width for piece in self.each()))

    def each(self) -> "list[PieceRead]":
        """This rank's pieces. Raises ValueError unless bounds cover the dimension exactly once."""
        dim, bounds = self.pieces.dim, self.pieces.bounds or ((0, self.shape[0]),)
        edges = [0, *(last for _, last in bounds)]
        if edges[:-1] != [first for first, _ in bounds] or edges[-1] != self.shape[dim]:
            raise ValueError(f"pieces {bounds} do not cover dimension {dim} of {self.shape}")
        return [PieceRead(self, number, *bounds[number]) for number in self.pieces.mine]

    @property
    def own_bounds(self) -> tuple[tuple[int, int], ...]:
        """The bounds of this rank's pieces."""
        pieces = self.pieces
        return tuple(pieces.bounds[number] for number in pieces.mine) if pieces.bounds else ()

    def cut(self, extent: int) -> tuple[int, ...]:
        """Its shape with another extent of the dimension along which it is divided."""
        dim = self.pieces.dim
        return (*self.shape[:dim], extent, *self.shape[dim + 1 :])


class PieceRead(NamedTuple):
    """One piece to read: elements [first, last) of a tensor along the dimension of its pieces."""

    tensor: TensorRead
    number: int
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all of the piece."""
        return self.tensor.cut(self.last - self.first)

    @property
    def width(self) -> int:
        """Elements along the dimension that are used here."""
        kept = self.tensor.pieces.kept
        return self.last - self.first if kept is None else len(kept)

    @property
    def size(self) -> int:
        """About its bytes in a file: two for each value."""
        return 2 * prod(self.shape)


def part_of(name: str, shape: tuple[int, ...], dim: int, first: int, last: int) -> PieceRead:
    """Elements [first, last) along `dim` of a tensor that is divided nowhere."""
    return PieceRead(TensorRead(name, shape, Pieces(dim, (), range(0, 1))), 0, first, last)


class TensorLeft(NamedTuple):
    """A tensor that only other ranks read: here it is checked for its shape alone."""

    name: str
    shape: tuple[int, ...]
