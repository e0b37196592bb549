"""C2SP tlog-tiles: where a tree's hashes and leaves lie, and how they are read and written.

A tile of level l holds up to 256 hashes, each of a complete subtree of 256**l leaves; it lies at
`tile/<l>/<n>`, a partial one of width w at `tile/<l>/<n>.p/<w>`. An entry bundle holds the leaves
of a tile of level 0, each after its length (uint16, big-endian), at `tile/entries/<n>[.p/<w>]`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from tpdet.audit.log.merkle import (
    EMPTY_ROOT,
    HASH_BYTES,
    CompactRange,
    leaf_hash,
    node_hash,
    split,
    tree_hash,
)
from tpdet.errors import AuditError

WIDTH = 256
LEVEL_BITS = 8
MOST_LEAF_BYTES = 0xFFFF
ENTRIES = "entries"


def tile_path(level: int | str, index: int, width: int = WIDTH) -> str:
    """The path of a tile, or of a bundle where the level is `ENTRIES`."""
    digits = str(index)
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    groups = [digits[begin : begin + 3] for begin in range(0, len(digits), 3)]
    number = "/".join([*(f"x{group}" for group in groups[:-1]), groups[-1]])
    return f"tile/{level}/{number}" + ("" if width == WIDTH else f".p/{width}")


class TileFile(NamedTuple):
    """A tile, or a bundle where the level is `ENTRIES`: its bytes and where they lie."""

    level: int | str
    number: int
    width: int
    data: bytes

    @property
    def path(self) -> str:
        """The path below the log's directory."""
        return tile_path(self.level, self.number, self.width)


def encode_entries(leaves: Iterable[bytes]) -> bytes:
    """The bytes of an entry bundle. Raises OverflowError for a leaf above `MOST_LEAF_BYTES`."""
    return b"".join(len(leaf).to_bytes(2, "big") + leaf for leaf in leaves)


def decode_entries(data: bytes, name: str) -> list[bytes]:
    """The leaves of an entry bundle. Raises AuditError, by the bundle's name, where it is cut."""
    leaves: list[bytes] = []
    begin = 0
    while begin < len(data):
        end = begin + 2 + int.from_bytes(data[begin : begin + 2], "big")
        if begin + 2 > len(data) or end > len(data):
            raise AuditError(f"{name} ends within its leaf {len(leaves)}: take the file again")
        leaves.append(data[begin + 2 : end])
        begin = end
    return leaves


class RightEdge:
    """The tiles at the right edge of a growing tree, those that are not full."""

    def __init__(
        self, size: int = 0, leaves: Iterable[bytes] = (), tiles: Iterable[Iterable[bytes]] = ()
    ) -> None:
        self.size, self.leaves, self.tiles = size, [*leaves], [[*tile] for tile in tiles]

    def extend(self, leaves: Iterable[bytes]) -> Iterator[TileFile]:
        """Add leaves; yields each tile and bundle that became full."""
        for leaf in leaves:
            self.leaves.append(leaf)
            self.size += 1
            if len(self.leaves) == WIDTH:
                data = encode_entries(self.leaves)
                yield TileFile(ENTRIES, self.size // WIDTH - 1, WIDTH, data)
                self.leaves.clear()
            yield from self._add(0, leaf_hash(leaf))

    def _add(self, level: int, node: bytes) -> Iterator[TileFile]:
        if level == len(self.tiles):
            self.tiles.append([])
        tile = self.tiles[level]
        tile.append(node)
        if len(tile) == WIDTH:
            index = (self.size >> LEVEL_BITS * (level + 1)) - 1
            yield TileFile(level, index, WIDTH, b"".join(tile))
            above = tree_hash(tile)
            tile.clear()
            yield from self._add(level + 1, above)

    def partial(self) -> Iterator[TileFile]:
        """The partial tiles and bundle of the tree as it is now."""
        if self.leaves:
            data = encode_entries(self.leaves)
            yield TileFile(ENTRIES, self.size // WIDTH, len(self.leaves), data)
        for level, tile in enumerate(self.tiles):
            if tile:
                index = self.size >> LEVEL_BITS * (level + 1)
                yield TileFile(level, index, len(tile), b"".join(tile))

    def tree(self) -> CompactRange:
        """The whole tree's complete subtrees."""
        subtrees: list[bytes] = []
        for tile in reversed(self.tiles):
            begin = 0
            while begin < len(tile):
                count = 1 << (len(tile) - begin).bit_length() - 1
                subtrees.append(tree_hash(tile[begin : begin + count]))
                begin += count
        return CompactRange(self.size, subtrees)


class Tiles:
    """The tiles and bundles of a tree of `size` leaves, read where they are needed.

    `read` gives the bytes at a path below the log's directory, or raises FileNotFoundError. All
    methods raise AuditError, by the file's name, for one that is missing, cut or too long.
    """

    def __init__(self, read: Callable[[str], bytes], size: int) -> None:
        self.size = size
        self._read = read
        self.hashes = lru_cache(64)(self._hashes)
        self.leaves = lru_cache(2)(self._leaves)

    def _width(self, level: int, index: int) -> int:
        return min(WIDTH, (self.size >> LEVEL_BITS * level) - index * WIDTH)

    def _hashes(self, level: int, index: int) -> Sequence[bytes]:
        """The hashes of a tile."""
        width = self._width(level, index)
        name, data = self._bytes(level, index, width)
        hashes = [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]
        if len(data) != HASH_BYTES * (width if name.endswith(f".p/{width}") else WIDTH):
            raise AuditError(f"{name} has {len(data)} bytes, not 32 for each hash: take it again")
        return hashes[:width]

    def _leaves(self, index: int) -> Sequence[bytes]:
        """The leaves of a bundle."""
        width = self._width(0, index)
        name, data = self._bytes(ENTRIES, index, width)
        leaves = decode_entries(data, name)
        if len(leaves) != (width if name.endswith(f".p/{width}") else WIDTH):
            raise AuditError(f"{name} has {len(leaves)} leaves, not its width: take it again")
        return leaves[:width]

    def _bytes(self, level: int | str, index: int, width: int) -> tuple[str, bytes]:
        """The path and bytes; the full tile may have taken the partial one's place."""
        for wide in dict.fromkeys((width, WIDTH)):
            path = tile_path(level, index, wide)
            try:
                return path, self._read(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
        first = index * WIDTH << (0 if isinstance(level, str) else LEVEL_BITS * level)
        raise AuditError(f"{tile_path(level, index, width)} is missing: it is of leaf {first} on")

    def leaf(self, index: int) -> bytes:
        """One leaf."""
        return self.leaves(index // WIDTH)[index % WIDTH]

    def subtree(self, begin: int, end: int) -> bytes:
        """The hash of D[begin:end], by the tiles alone."""
        size = end - begin
        if size & (size - 1) or begin % size:
            middle = begin + split(size)
            return node_hash(self.subtree(begin, middle), self.subtree(middle, end))
        level = (size.bit_length() - 1) // LEVEL_BITS
        first, count = begin >> LEVEL_BITS * level, size >> LEVEL_BITS * level
        tile = self.hashes(level, first // WIDTH)
        return tree_hash(tile[first % WIDTH : first % WIDTH + count])

    def root_at(self, size: int) -> bytes:
        """The root of the first `size` leaves, by the tiles alone."""
        return self.subtree(0, size) if size else EMPTY_ROOT

    def right_edge(self) -> RightEdge:
        """The tiles that are not full, to add leaves to."""
        tiles: list[Sequence[bytes]] = []
        while count := self.size >> LEVEL_BITS * len(tiles):
            level = len(tiles)
            tiles.append(self.hashes(level, count // WIDTH) if count % WIDTH else ())
        leaves = self.leaves(self.size // WIDTH) if self.size % WIDTH else ()
        return RightEdge(self.size, leaves, tiles)
