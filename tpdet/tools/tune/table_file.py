"""Write what was tuned: the shape table, and all measured times.

The table is canonical JSON, replaced in one step and joined with what stands there. Times are JSON
lines of winners and losers: what the costs of tiles are fitted on.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpdet.kernels.cuda.gemm.choice.expert_entries import SIZES
from tpdet.kernels.cuda.gemm.choice.shape_table import FORMAT, ShapeTable, parse_table
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.inputs.experts import ExpertLayer
from tpdet.kernels.inputs.product import Product
from tpdet.tools.tune.experts import LayerRow, TunedLayer
from tpdet.tools.tune.products import TunedProduct, TunedRow

_FREE = ("date",)  # may differ between runs that share a file
_KEY = ("kind", "n", "k", "leaves", "dtype", "roots")
_LAYER_KEY = (*SIZES, "dtype")


def write_table(
    path: Path,
    environment: Mapping[str, str],
    tuned: Iterable[TunedProduct],
    layers: Iterable[TunedLayer] = (),
) -> None:
    """Add products and layers of experts to the table at `path`.

    One made in another environment is replaced whole. Raises ValueError if what stands there is no
    table.
    """
    standing = _standing(path, environment)
    data = {
        "format": FORMAT,
        "environment": dict(environment),
        "products": _joined(_KEY, standing.get("products", []), map(_entry, tuned)),
        "experts": _joined(_LAYER_KEY, standing.get("experts", []), map(_layer_entry, layers)),
    }
    if not data["experts"]:
        del data["experts"]
    text = json.dumps(data, sort_keys=True, indent=1) + "\n"
    parse_table(text, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def append_times(path: Path, environment: Mapping[str, str], tuned: TunedProduct) -> None:
    """Add a product's line: microseconds of the peer and candidates by bucket. Raises OSError."""
    line = asdict(tuned.product) | {
        "gpu": environment["gpu"],
        "peer_us": {str(rows): round(row.peer_us, 2) for rows, row in tuned.rows.items()},
        "us": {str(rows): _rounded(times) for rows, times in tuned.times.items()},
        "refused": tuned.refused,
    }
    del line["widths"]  # equal leaves alone are tuned
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(us, 2) for name, us in times.items()}


def _joined(
    names: tuple[str, ...], old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Entries in the order of their keys, of two with one key the new one."""
    entries = {tuple(entry.get(name, "") for name in names): entry for entry in (*old, *new)}
    return [entries[key] for key in sorted(entries)]


def layers_in(path: Path, environment: Mapping[str, str]) -> frozenset[ExpertLayer]:
    """The layers of experts that stand at `path`; as `products_in`."""
    return frozenset(_parsed(path, environment).experts)


def products_in(path: Path, environment: Mapping[str, str]) -> frozenset[Product]:
    """The products at `path`, measured in this environment. Raises ValueError for no table."""
    return frozenset(_parsed(path, environment).products)


def _parsed(path: Path, environment: Mapping[str, str]) -> ShapeTable:
    standing = _standing(path, environment)
    return parse_table(json.dumps(standing), str(path)) if standing else ShapeTable({}, {})


def _standing(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """What stands at `path`, if its environment is this one."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    there = dict(parse_table(text, str(path)).environment)
    here = dict(environment)
    for name in _FREE:
        there.pop(name, None)
        here.pop(name, None)
    return dict(json.loads(text)) if there == here else {}


def _entry(tuned: TunedProduct) -> dict[str, Any]:
    product = tuned.product
    rows = {str(bucket): _row(row) for bucket, row in tuned.rows.items()}
    entry = {name: getattr(product, name) for name in ("kind", "n", "k", "leaves")}
    entry |= {"dtype": "bfloat16", "rows": rows}
    return entry | ({"roots": product.roots} if product.kind == "row" else {})


def _row(row: TunedRow) -> dict[str, Any]:
    entry: dict[str, Any] = _rounded({"us": row.us, "tile_us": row.tile_us, "peer_us": row.peer_us})
    entry["tile"] = format_tile(row.choice.tile)
    if row.choice.library is not None:
        entry["library"] = row.choice.library
    if row.choice.cut:
        entry |= {"cut": row.choice.cut, "kernel": row.choice.kernel}
    return entry


def _layer_entry(tuned: TunedLayer) -> dict[str, Any]:
    sizes = asdict(tuned.expert.layer)
    steps = {str(tokens): _layer_row(row) for tokens, row in tuned.rows.items()}
    return sizes | {"dtype": "bfloat16", "tokens": steps}


def _layer_row(row: LayerRow) -> dict[str, Any]:
    times = _rounded({"us": row.us, "static_us": row.static_us, "floor_us": row.floor_us})
    tiles = {"gate_up": format_tile(row.tiles.gate_up), "down": format_tile(row.tiles.down)}
    return times | tiles | {"by_token": row.tiles.by_token}
