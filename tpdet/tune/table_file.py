"""Write the shape table: canonical JSON, replaced in one step, joined with what stands there."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tpdet.kernels.cuda.gemm.choice.shape_table import FORMAT, parse_table
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.inputs.product import Product
from tpdet.tune.product import Row, Tuned

_FREE = ("date",)  # may differ between runs that share a file
_KEY = ("kind", "n", "k", "leaves", "dtype", "roots")


def write_table(path: Path, environment: Mapping[str, str], tuned: Iterable[Tuned]) -> None:
    """Add products to the table at `path`; one made in another environment is replaced whole.

    Raises ValueError if what stands there is no table.
    """
    products = {_key(entry): entry for entry in _standing(path, environment)}
    products |= {_key(entry): entry for entry in map(_entry, tuned)}
    data = {
        "format": FORMAT,
        "environment": dict(environment),
        "products": [products[key] for key in sorted(products)],
    }
    text = json.dumps(data, sort_keys=True, indent=1) + "\n"
    parse_table(text, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def products_in(path: Path, environment: Mapping[str, str]) -> frozenset[Product]:
    """The products that stand at `path`, measured in this environment.

    Raises ValueError if what stands there is no table.
    """
    if not _standing(path, environment):
        return frozenset()
    return frozenset(parse_table(path.read_text(encoding="utf-8"), str(path)).products)


def _standing(path: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The products that stand at `path`, if their environment is this one."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    there = dict(parse_table(text, str(path)).environment)
    here = dict(environment)
    for name in _FREE:
        there.pop(name, None)
        here.pop(name, None)
    return json.loads(text)["products"] if there == here else []


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name, "") for name in _KEY)


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
