"""Checking a whole tree against its signed root, and saying which leaf or tile is wrong."""

from typing import NamedTuple

from tpdet.audit.log.merkle import tree_hash
from tpdet.audit.log.tiles import LEVEL_BITS, WIDTH, RightEdge, TileFile, Tiles
from tpdet.errors import AuditError

_MOST_DIFFERENCES = 1000


class _Difference(NamedTuple):
    """A hash of a tile that is not the one computed from the leaves it covers."""

    first_leaf: int
    level: int
    number: int
    position: int
    path: str

    @property
    def last_leaf(self) -> int:
        return self.first_leaf + (1 << LEVEL_BITS * self.level) - 1

    @property
    def hash_name(self) -> str:
        return f"hash {self.position} of {self.path}"

    @property
    def leaf_names(self) -> str:
        covered = f"one of the leaves {self.first_leaf}-{self.last_leaf}"
        return covered if self.level else f"leaf {self.first_leaf}"


def verify_tree(tiles: Tiles, root: bytes) -> None:
    """Compare leaves with tiles, and both with the signed root.

    Raises AuditError by the first wrong leaf, tile or missing file. Where leaves and tiles differ,
    the one that does not lead to the root is wrong.
    """
    edge, differences = RightEdge(), []
    for bundle in range(-(-tiles.size // WIDTH)):
        for tile in edge.extend(tiles.leaves(bundle)):
            differences += _differences(tiles, tile)
        if len(differences) > _MOST_DIFFERENCES:
            break
    else:
        for tile in edge.partial():
            differences += _differences(tiles, tile)
        if edge.tree().root() == root:
            if differences:
                first = min(differences)
                raise AuditError(f"{first.hash_name} was changed: the leaves lead to the root")
            return
    signed = tiles.right_edge().tree().root() == root
    for difference in sorted(differences, key=lambda one: (one.last_leaf, one.level)):
        if signed and _leads_to_edge(tiles, difference.level, difference.number):
            raise AuditError(
                f"{difference.leaf_names} was changed: {difference.hash_name}, which leads to the "
                "signed root, is another"
            )
    if differences:
        first = min(differences)
        raise AuditError(
            f"{first.leaf_names} and {first.hash_name} differ, and neither leads to the signed root"
        )
    raise AuditError(
        f"the log was forked: its {tiles.size} leaves and their tiles agree, and have another root "
        "than the signed checkpoint"
    )


def _differences(tiles: Tiles, computed: TileFile) -> list[_Difference]:
    """Where a stored tile differs from the computed one."""
    level, index = computed.level, computed.number
    if isinstance(level, str) or b"".join(tiles.hashes(level, index)) == computed.data:
        return []
    size, first = len(computed.data) // computed.width, index * WIDTH << LEVEL_BITS * level
    return [
        _Difference(first + (position << LEVEL_BITS * level), level, index, position, computed.path)
        for position, node in enumerate(tiles.hashes(level, index))
        if node != computed.data[position * size : (position + 1) * size]
    ]


def _leads_to_edge(tiles: Tiles, level: int, index: int) -> bool:
    """Whether each tile above holds the hash of the one below, up to one at the right edge."""
    while (index + 1) * WIDTH <= tiles.size >> LEVEL_BITS * level:
        above = tiles.hashes(level + 1, index // WIDTH)
        if above[index % WIDTH] != tree_hash(tiles.hashes(level, index)):
            return False
        level, index = level + 1, index // WIDTH
    return True
