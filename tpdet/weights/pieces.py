"""How a tensor is cut along one dimension, whatever the number of ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pieces:
    """A cut into ranges that does not depend on the tensor-parallel size, and this rank's share.

    `bounds[i]` is piece i along `dim`; pieces are contiguous and ascending. `mine` are the pieces
    this rank reads, neighbours. Several ranks may read one piece (shared key heads, norms).
    """

    dim: int
    bounds: tuple[tuple[int, int], ...]
    mine: range

    @classmethod
    def whole(cls) -> "Pieces":
        """The uncut tensor, read by every rank; its one bound is filled in from the shape."""
        return cls(0, (), range(0, 1))

    def ranges(self, shape: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
        """(index, bound) of this rank's pieces of a tensor of `shape`.

        Raises ValueError when the bounds do not cover the tensor, each element once.
        """
        bounds = self.bounds or ((0, shape[0]),)
        edges = [0, *(last for _, last in bounds)]
        if edges[:-1] != [first for first, _ in bounds] or edges[-1] != shape[self.dim]:
            raise ValueError(f"pieces {bounds} do not cover dimension {self.dim} of {shape}")
        return [(index, bounds[index]) for index in self.mine]
