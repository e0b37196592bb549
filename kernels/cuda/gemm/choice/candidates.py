"""Tiles worth measuring for a product on a GPU: those of `candidate_tiles.json` that fit both.

The tuner measures them; the static choice of row products estimates them. They reach further than
the static choice of column products: more stages (a narrow shard has few programs, so each must
keep many bytes in flight), tiles of 8 or 16 weight rows with 512 steps of K (many programs,
`mma.sync`), and the weight on the M side of descriptor tiles. There is no pointer tile of 8 x 64:
ptxas serialises its wgmma (warning C7515). In two leaves the largest tile has no registers for a
second chain of row products. Products of up to 3,072 columns are narrow: a tile of 64 columns a
program would leave processors idle.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice, cut_roots
from tpdet.kernels.cuda.gemm.choice.variants import CHAIN, FOLDS, variant_of
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm, root_form
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import ProductShape
from tpdet.kernels.cuda.hardware import Gpu
from tpdet.kernels.inputs.activations import GATED_KINDS
from tpdet.kernels.order import Expression

_CUTS = (1, 2, 4, 8)
_FLOAT32_BYTES = 4
_NO_END = 1 << 62


class Size(NamedTuple):
    """What makes a tile beside its variant."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class TileRule(NamedTuple):
    """Products with rows and columns in these bounds, both included, may take the tiles.

    kernels: which of them run at each cut of a row product. ctas: programs a multiprocessor.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    variant: str
    tiles: tuple[Size, ...]
    ctas: int = 1
    kernels: Mapping[int, tuple[str, ...]] = {}


def _rules(lists: Mapping[str, list[list[int]]], rows: list[dict[str, Any]]) -> list[TileRule]:
    """The rules of a table, whose tiles are names of lists; null is a bound without an end."""
    return [
        TileRule(
            (row["rows"][0], row["rows"][1] or _NO_END),
            (row["columns"][0], row["columns"][1] or _NO_END),
            row["variant"],
            tuple(Size(*size) for name in row["tiles"] for size in lists[name]),
            row.get("ctas", 1),
            {int(cut): (*names,) for cut, names in row.get("kernels", {}).items()},
        )
        for row in rows
    ]


_TABLES = json.loads(Path(__file__).with_name("candidate_tiles.json").read_text(encoding="utf-8"))
COLUMN_TILES = _rules(_TABLES["tiles"], _TABLES["columns"])
"""In the order in which they are measured."""
ROW_TILES = _rules(_TABLES["tiles"], _TABLES["rows"])
"""In the order in which they are measured, a cut after another; equal estimates take the first."""


def column_candidates(m: int, n: int, k: int, kind: str, gpu: Gpu) -> tuple[Tile, ...]:
    """Tiles worth measuring for `m` rows (a bucket) of a product [n, k] of one leaf, by its kind.

    Without repeats, each with a depth that divides k, none over the shared memory.
    """
    shape = ProductShape(m, n, k, 1, 4 if kind == "head" else 2, kind in GATED_KINDS)
    tiles = (tile for _, tile in _ruled(COLUMN_TILES, shape))
    return tuple(dict.fromkeys(t for t in tiles if _fits(CHAIN, t, None, shape, gpu)))


def leaf_candidates(
    m: int, n: int, k: int, leaves: int, roots: tuple[Expression, ...], gpu: Gpu
) -> tuple[LeafChoice, ...]:
    """Cuts, kernels and tiles worth measuring for m rows of leaves [n, k]; without repeats.

    They won somewhere on an H200, or lie beside what did.
    """
    shape = ProductShape(m, n, k, leaves, _FLOAT32_BYTES)
    choices: dict[LeafChoice, None] = {}
    for cut in _CUTS:
        parts = cut_roots(roots, cut)
        form = None if parts is None else root_form(0, leaves, parts[0])
        if form is None:
            continue
        for rule, tile in _ruled(ROW_TILES, shape):
            for kernel in rule.kernels.get(cut, ()):
                if _fits(kernel, tile, form, shape, gpu):
                    choices[LeafChoice(cut, kernel, tile)] = None
    return tuple(choices)


def _ruled(rules: Iterable[TileRule], shape: ProductShape) -> Iterator[tuple[TileRule, Tile]]:
    """The tiles of the rules for a shape, whether they fit or not."""
    for rule in rules:
        if _within(shape.m, rule.rows) and _within(shape.n, rule.columns):
            for size in rule.tiles:
                tile = Tile(*size, rule.variant, ctas=rule.ctas).at(shape.k)
                yield rule, tile.storing(shape.out_bytes)


def _within(value: int, bounds: tuple[int, int]) -> bool:
    """Whether a value is in bounds that are both included."""
    return bounds[0] <= value <= bounds[1]


def _fits(kernel: str, tile: Tile, form: RootForm | None, shape: ProductShape, gpu: Gpu) -> bool:
    """Whether a kernel computes the shape, whose subtrees have the form, by a tile on a GPU."""
    variant = variant_of(tile)
    if variant.descriptors and not gpu.descriptors:
        return False
    if kernel == CHAIN or form is None:
        return variant.fits(shape, tile, gpu)
    return FOLDS[kernel].fits(form, shape.k, tile, gpu)
