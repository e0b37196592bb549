"""What a product takes by a tile, in microseconds, estimated from the fitted costs of the tile.

    time      launch + (compute^4 + memory^4)^(1/4) + read / reader
    compute   rounds of programs: steps * max(latency, resident * step), and an end each
    memory    bytes of weights, activations and outputs / bandwidth
    read      bytes that the reader of a row product's sums moves

The costs of tiles (`tile_costs/<gpu>.json`) are fitted by `scripts/fit_tile_costs.py` on times that
`tpdet tune --times` measured; a GPU without a file takes the H200's. A tile without costs is never
estimated: it was not measured, or its estimates mislead.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants.tile import DEEPEST, Tile
from tpdet.kernels.cuda.hardware import H200, file_name
from tpdet.kernels.inputs.activations import GATED_KINDS

FOLDER = Path(__file__).resolve().parent / "tile_costs"
COLUMN, HEAD = "column", "head"
"""Names of costs beside those of the kernels of row products: columns and gated products, heads."""

_SHARPNESS = 4  # of the bend between what compute and what memory bounds
_MOST_THREADS = 2048  # of a multiprocessor
_MOST_PROGRAMS = 8  # of a multiprocessor that the estimate tells apart
_PROGRAM_BYTES = 1024  # of shared memory that each program takes beside its own
_OUTPUT_BYTES = {"column": 2.0, "gated": 1.0, "geglu": 1.0, "head": 4.0, "row": 4.0}
"""Of a row of x and a row of the weight."""


class Cost(NamedTuple):
    """Of a tile: microseconds; bandwidth and reader in megabytes a microsecond."""

    launch: float
    step: float
    latency: float
    end: float
    gated_end: float
    bandwidth: float
    reader: float


class Work(NamedTuple):
    """x [m, units * cut * k] times weights [n, k]: `units` sums of `cut` leaves each."""

    kind: str
    m: int
    n: int
    k: int
    units: int = 1
    cut: int = 1


@cache
def tile_costs(gpu: str) -> dict[str, Cost]:
    """Costs by `cost_name`, of a GPU by its name."""
    path = costs_path(gpu)
    if not path.exists():
        path = costs_path(H200.name)
    data = json.loads(path.read_text(encoding="utf-8"))
    return {name: Cost(*values) for name, values in data["costs"].items()}


def costs_path(gpu: str) -> Path:
    """Where the costs of a GPU stand: "NVIDIA H200" -> tile_costs/nvidia-h200.json."""
    return FOLDER / f"{file_name(gpu)}.json"


def cost_of(costs: Mapping[str, Cost], work: Work, kernel: str, tile: Tile) -> Cost | None:
    """A tile's costs; those of the same tile of deeper steps, in proportion, where K cut its depth.

    kernel: as of `cost_name`. None for a tile without costs.
    """
    depth = tile.depth
    while depth <= DEEPEST:
        found = costs.get(cost_name(work, kernel, replace(tile, depth=depth)))
        if found is not None:
            share = tile.depth / depth
            return found._replace(step=found.step * share, latency=found.latency * share)
        depth *= 2
    return None


def cost_name(work: Work, kernel: str, tile: Tile) -> str:
    """Such as "column 64x64x128 w4 s4 tma" or, of a row product with cuts of two, "flat 2 64x...".

    kernel: of a row product; else empty.
    """
    group = f"{kernel} {work.cut}" if kernel else HEAD if work.kind == "head" else COLUMN
    return f"{group} {format_tile(tile)}"


class Load(NamedTuple):
    """What a multiprocessor does for a product by a tile; numbers, or arrays of many products'.

    rounds: of `resident` programs at once; rest: programs of the last, shorter round; partial: 1 if
    there is one; gated: 1 of gated products; moved, read: bytes.
    """

    rounds: Any
    resident: Any
    rest: Any
    partial: Any
    steps: Any
    gated: Any
    moved: Any
    read: Any


def load_of(tile: Tile, work: Work, multiprocessors: int) -> Load:
    """Of a product whose depth the tile's divides."""
    blocks = work.units * -(-work.m // tile.rows) * -(-work.n // tile.columns)
    resident = _resident(tile, work.kind)
    rounds, rest = divmod(-(-blocks // multiprocessors), resident)
    outputs, depth = work.m * work.n * work.units, work.units * work.cut * work.k
    moved = 2 * depth * (work.n + work.m) + _OUTPUT_BYTES[work.kind] * outputs
    read = 4 * outputs + 12 * work.m * work.n if work.kind == "row" else 0
    steps, gated = work.cut * work.k / tile.depth, float(work.kind in GATED_KINDS)
    return Load(rounds, resident, rest, float(rest > 0), steps, gated, moved, read)


def microseconds(cost: Cost, load: Load) -> Any:
    """The estimate; an array of estimates if the load holds arrays."""
    step = load.rounds * _larger(cost.latency, load.resident * cost.step)
    step += load.partial * _larger(cost.latency, load.rest * cost.step)
    end = load.gated * cost.gated_end + (1 - load.gated) * cost.end
    compute = load.steps * step + (load.rounds + load.partial) * end
    memory = load.moved / (cost.bandwidth * 1e6)
    bent = (compute**_SHARPNESS + memory**_SHARPNESS) ** (1 / _SHARPNESS)
    return cost.launch + bent + load.read / (cost.reader * 1e6)


def _larger(left: Any, right: Any) -> Any:
    """Of two numbers, or of each pair of two arrays."""
    return (left + right + abs(left - right)) / 2


def _resident(tile: Tile, kind: str) -> int:
    """Programs that run on a multiprocessor at once."""
    variant = variant_of(tile)
    if variant.descriptors:
        return tile.ctas
    held = variant.shared_bytes(tile, int(_OUTPUT_BYTES[kind])) + _PROGRAM_BYTES
    by_threads = _MOST_THREADS // (32 * tile.warps)
    return max(1, min(H200.shared_bytes // held, _MOST_PROGRAMS, by_threads))
