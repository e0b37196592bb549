"""How a variant is cut: the tile of a program, its warps, its pipeline stages."""

from dataclasses import dataclass, replace

K_GROUP = 16
"""Products that one matrix instruction adds up: every depth and every K is a multiple of it."""

_DEPTHS = (512, 256, 128, 64, 32, 16)
DEEPEST = _DEPTHS[0]
_LARGEST = 128 * 256
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Tile:
    """Tile [rows, columns] of the output by `depth` of K, for one program.

    variant: the name of the variant that runs it; halves: the pieces in which the store goes
    through shared memory; ctas: programs a multiprocessor, where a program loops over tiles.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    variant: str = "pointer"
    halves: int = 1
    ctas: int = 1

    def at(self, k: int) -> "Tile":
        """The same with the largest depth that divides `k`: a tile never crosses the end of K."""
        depth = next(d for d in _DEPTHS if d <= self.depth and k % d == 0)
        return self if depth == self.depth else replace(self, depth=depth)

    @property
    def area(self) -> int:
        """Values of the output."""
        return self.rows * self.columns

    def blocks(self, m: int, n: int, count: int = 1) -> int:
        """Tiles of `count` outputs [m, n]."""
        return count * -(-m // self.rows) * -(-n // self.columns)

    def storing(self, size: int) -> "Tile":
        """The same for values of `size` bytes: the largest fp32 tile does not fit beside the
        stages, so it is stored in two pieces."""
        large = size == _FLOAT32_BYTES and self.rows * self.columns >= _LARGEST
        return replace(self, halves=2) if large else self

    @property
    def stage_bytes(self) -> int:
        """Shared memory of the stages of operands of two bytes."""
        return (self.rows + self.columns) * self.depth * 2 * self.stages
