"""Entries of the shape table for layers of experts: tiles of both products, by tokens of a step.

    {"hidden": 2048, "width": 768, "held": 128, "total": 128, "chosen": 8, "dtype": "bfloat16",
     "tokens": {"16": {"gate_up": "16x128x64 w4 s10 swap tma specialised", "down": ...,
                       "by_token": true, "us": 190.6, "static_us": 200.6, "floor_us": 177.2}}}

An entry serves steps of up to its tokens, the largest one longer steps too. Both products have
blocks of one height, the rows of their tiles.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from tpdet.kernels.cuda.gemm.choice.tile_text import parse_tile
from tpdet.kernels.cuda.gemm.choice.variants import EXPERT_VARIANTS
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.inputs.experts import ExpertLayer

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens of a step at which layers of experts are measured."""
SIZES = tuple(field.name for field in fields(ExpertLayer))


class LayerTiles(NamedTuple):
    """What runs a layer's experts: tiles of both products, and whether blocks are by token.

    `experts/sorted_tokens.py` says what that is; the table calls it "spread".
    """

    gate_up: Tile
    down: Tile
    by_token: bool


def parse_layers(entries: Iterable[Mapping[str, Any]]) -> dict[ExpertLayer, dict[int, LayerTiles]]:
    """Tiles by layer and tokens, ascending. Raises ValueError, KeyError or TypeError."""
    found: dict[ExpertLayer, dict[int, LayerTiles]] = {}
    for entry in entries:
        sizes = [entry[name] for name in SIZES]
        if any(type(n) is not int or n < 1 for n in sizes) or entry["dtype"] != "bfloat16":
            raise ValueError(f"no layer of experts: {sizes} {entry['dtype']!r}")
        layer = ExpertLayer(*sizes)
        if layer in found:
            raise ValueError(f"{layer} stands there twice")
        steps = {int(tokens): _tiles(int(tokens), row) for tokens, row in entry["tokens"].items()}
        if not steps or steps[max(steps)].by_token:
            raise ValueError(f"{layer}: no tiles for steps of any length")
        found[layer] = dict(sorted(steps.items()))
    return found


def _tiles(tokens: int, row: Mapping[str, Any]) -> LayerTiles:
    tiles = LayerTiles(parse_tile(row["gate_up"]), parse_tile(row["down"]), row["by_token"])
    known = {tiles.gate_up.variant, tiles.down.variant} <= EXPERT_VARIANTS.keys()
    fits = tiles.gate_up.rows == tiles.down.rows and tokens in TOKENS and known
    if not fits or type(tiles.by_token) is not bool:
        raise ValueError(f"{tokens} tokens: blocks of two heights, or no such bucket or tile")
    if tiles.by_token and tokens > tiles.gate_up.rows:
        raise ValueError(f"{tokens} tokens do not fit blocks by token of {tiles.gate_up.rows}")
    return tiles
