"""The division of a tensor along one dimension, independent of the number of ranks."""

from dataclasses import dataclass


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

    def ranges(self, shape: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
        """(index, bound) of this rank's pieces of a tensor of `shape`.

        Raises ValueError unless the bounds cover each element of the dimension exactly once.
        """
        bounds = self.bounds or ((0, shape[0]),)
        edges = [0, *(last for _, last in bounds)]
        if edges[:-1] != [first for first, _ in bounds] or edges[-1] != shape[self.dim]:
            raise ValueError(f"pieces {bounds} do not cover dimension {self.dim} of {shape}")
        return [(index, bounds[index]) for index in self.mine]

    def held(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what this rank uses of a tensor of `shape`; raises as `ranges`."""
        width = sum(width for _, _, (_, width) in self.places(shape))
        return (*shape[: self.dim], width, *shape[self.dim + 1 :])

    def places(self, shape: tuple[int, ...]) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
        """(index, bound, (first, width) where its elements lie in `held`) of this rank's pieces.

        Raises as `ranges`.
        """
        found, at = [], 0
        for index, (first, last) in self.ranges(shape):
            width = last - first if self.kept is None else len(self.kept)
            found.append((index, (first, last), (at, width)))
            at += width
        return found
