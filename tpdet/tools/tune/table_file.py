"""Write the shape table: canonical JSON, replaced in one step, joined with what stands there."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpdet.kernels.cuda.gemm.choice.expert_entries import SIZES
from tpdet.kernels.cuda.gemm.choice.shape_table import FORMAT, parse_table
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.inputs.experts import ExpertLayer
from tpdet.kernels.inputs.product import Product
from tpdet.tools.tune.experts import LayerRow, TunedLayer
from tpdet.tools.tune.product import Row, Tuned

_FREE = ("date",)  # may differ between runs that share a file
_KEY = ("kind", "n", "k", "leaves", "dtype", "roots")
_LAYER_KEY = (*SIZES, "dtype")


def write_table(
    path: Path,
    environment: Mapping[str, str],
    tuned: Iterable[Tuned],
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


def _joined(
    names: tuple[str, ...], old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Entries in the order of their keys, of two with one key the new one."""
    found = {tuple(entry.get(name, "") for name in names): entry for entry in (*old, *new)}
    return [found[key] for key in sorted(found)]


def layers_in(path: Path, environment: Mapping[str, str]) -> frozenset[ExpertLayer]:
    """The layers of experts that stand at `path`; as `products_in`."""
    if not _standing(path, environment):
        return frozenset()
    return frozenset(parse_table(path.read_text(encoding="utf-8"), str(path)).experts)


def products_in(path: Path, environment: Mapping[str, str]) -> frozenset[Product]:
    """The products that stand at `path`, measured in this environment.

    Raises ValueError if what stands there is no table.
    """
    if not _standing(path, environment):
        return frozenset()
    return frozenset(parse_table(path.read_text(encoding="utf-8"), str(path)).products)


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


def _entry(tuned: Tuned) -> dict[str, Any]:
    product = tuned.product
    roots = {"roots": product.roots} if product.kind == "row" else {}
    return roots | {
        "kind": product.kind,
        "n": product.n,
        "k": product.k,
        "leaves": product.leaves,
        "dtype": "bfloat16",
        "rows": {str(bucket): _row(row) for bucket, row in tuned.rows.items()},
    }


def _row(row: Row) -> dict[str, Any]:
    times = {"us": row.us, "tile_us": row.tile_us, "peer_us": row.peer_us}
    entry: dict[str, Any] = {name: round(value, 2) for name, value in times.items()}
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
    times = {"us": row.us, "static_us": row.static_us, "floor_us": row.floor_us}
    entry: dict[str, Any] = {name: round(value, 2) for name, value in times.items()}
    tiles = {"gate_up": format_tile(row.tiles.gate_up), "down": format_tile(row.tiles.down)}
    return entry | tiles | {"spread": row.tiles.spread}
