"""A tile as text, as in the shape table: "64x128x64 w4 s5 tma h2 c2".

Rows, columns, depth, warps, stages; then the words of the variant, pieces of the store, programs a
multiprocessor, where they are not the plainest.
"""

import re

from tpdet.kernels.cuda.gemm.choice.variants import EXPERT_VARIANTS, VARIANTS
from tpdet.kernels.cuda.gemm.variants.tile import Tile

_TILE = re.compile(
    r"(\d+)x(\d+)x(\d+) w(\d+) s(\d+)(?P<stored>(?: [a-z]+)*)(?: h(?P<halves>\d+))?"
    r"(?: c(?P<ctas>\d+))?"
)
_STORED = {variant.name: variant.stored for variant in (VARIANTS | EXPERT_VARIANTS).values()}
_NAMES = {stored: name for name, stored in _STORED.items()}


def format_tile(tile: Tile) -> str:
    """The text of a tile."""
    words = [f"{tile.rows}x{tile.columns}x{tile.depth}", f"w{tile.warps}", f"s{tile.stages}"]
    stored = _STORED[tile.variant]
    words += [stored] * bool(stored)
    words += [f"h{tile.halves}"] * (tile.halves > 1) + [f"c{tile.ctas}"] * (tile.ctas > 1)
    return " ".join(words)


def parse_tile(text: str) -> Tile:
    """The inverse of `format_tile`. Raises ValueError."""
    found = _TILE.fullmatch(text)
    name = None if found is None else _NAMES.get(found["stored"].strip())
    if found is None or name is None:
        raise ValueError(f"{text!r} is no tile such as '64x128x64 w4 s5 tma'")
    rows, columns, depth, warps, stages = (int(part) for part in found.groups()[:5])
    halves, ctas = int(found["halves"] or 1), int(found["ctas"] or 1)
    tile = Tile(rows, columns, depth, warps, stages, name, halves, ctas)
    if format_tile(tile) != text:
        raise ValueError(f"{text!r} is not in canonical form: {format_tile(tile)!r}")
    return tile
