"""What a product takes by a tile, in microseconds: one formula over the measured costs of tiles.

    time      launch + norm(compute, memory) + read / reader (`roofline.py`)
    compute   rounds of programs: steps * max(latency, resident * step), and an end each
    memory    bytes of weights, activations and outputs / bandwidth
    read      bytes that the reader of a row product's sums moves

The costs of tiles (`tile_costs/<gpu>.json`) are fitted by `scripts/fit/tile_costs.py` on times that
`tpdet tune --times` measured; a GPU without a file takes those of `hardware.MEASURED`. A tile
without costs is never estimated: it was not measured, or its estimates mislead.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tpdet.kernels.cuda.cost.roofline import roofline
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants.tile import DEEPEST, Tile
from tpdet.kernels.cuda.hardware import MEASURED, Gpu, file_name
from tpdet.kernels.inputs.activations import GATED_KINDS

FOLDER = Path(__file__).resolve().parent / "tile_costs"
COLUMN, HEAD = "column", "head"
"""Names of costs beside those of the kernels of row products: columns and gated products, heads."""

_SHARPNESS = 4  # of the bend between what compute and what memory bounds
_MOST_THREADS = 2048  # of a multiprocessor
_MOST_PROGRAMS = 8  # of a multiprocessor that the estimate tells apart
_PROGRAM_BYTES = 1024  # of shared memory that each program takes beside its own
_OUTPUT_BYTES = {"column": 2.0, "gated": 1.0, "geglu": 1.0, "head": 4.0, "row": 4.0}
"""Bytes of the output for a row of x and a row of the weight, by kind."""


class TileCost(NamedTuple):
    """Microseconds of a tile's parts; bandwidth and reader in megabytes a microsecond."""

    launch: float
    step: float
    latency: float
    end: float
    gated_end: float
    bandwidth: float
    reader: float


class TileWork(NamedTuple):
    """x [m, units * cut * k] times weights [n, k]: `units` sums of `cut` leaves each, by a tile.

    kernel: of a row product, as in the shape table; else empty.
    """

    tile: Tile
    kind: str
    m: int
    n: int
    k: int
    units: int = 1
    cut: int = 1
    kernel: str = ""

    @property
    def blocks(self) -> int:
        """Tiles of the output."""
        return self.units * -(-self.m // self.tile.rows) * -(-self.n // self.tile.columns)


def microseconds(gpu: Gpu, work: TileWork) -> float | None:
    """The time of a product by a tile on a GPU; None for a tile without costs."""
    cost = cost_of(tile_costs(gpu.name), work)
    return None if cost is None else float(load_microseconds(cost, load_of(gpu, work)))


@cache
def tile_costs(gpu: str) -> dict[str, TileCost]:
    """Costs by `cost_name`, of a GPU by its name."""
    path = costs_path(gpu)
    if not path.exists():
        path = costs_path(MEASURED.name)
    data = json.loads(path.read_text(encoding="utf-8"))
    return {name: TileCost(*values) for name, values in data["costs"].items()}


def costs_path(gpu: str) -> Path:
    """Where the costs of a GPU stand: "NVIDIA H200" -> tile_costs/nvidia-h200.json."""
    return FOLDER / f"{file_name(gpu)}.json"


def cost_of(costs: Mapping[str, TileCost], work: TileWork) -> TileCost | None:
    """A tile's costs; those of the same tile of deeper steps, in proportion, where K cut its depth.

    None for a tile without costs.
    """
    tile, depth = work.tile, work.tile.depth
    while depth <= DEEPEST:
        cost = costs.get(cost_name(work._replace(tile=replace(tile, depth=depth))))
        if cost is not None:
            share = tile.depth / depth
            return cost._replace(step=cost.step * share, latency=cost.latency * share)
        depth *= 2
    return None


def cost_name(work: TileWork) -> str:
    """Such as "column 64x64x128 w4 s4 tma"; of a row product with cuts of two, "flat 2 64x..."."""
    name = HEAD if work.kind == "head" else COLUMN
    group = f"{work.kernel} {work.cut}" if work.kernel else name
    return f"{group} {format_tile(work.tile)}"


class TileLoad(NamedTuple):
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


def load_of(gpu: Gpu, work: TileWork) -> TileLoad:
    """The load of a product whose depth the tile's divides."""
    resident, kind = _resident(gpu, work), work.kind
    rounds, rest = divmod(-(-work.blocks // gpu.multiprocessors), resident)
    outputs, depth = work.m * work.n * work.units, work.units * work.cut * work.k
    moved = 2 * depth * (work.n + work.m) + _OUTPUT_BYTES[kind] * outputs
    read = 4 * outputs + 12 * work.m * work.n if kind == "row" else 0
    steps, gated = work.cut * work.k / work.tile.depth, float(kind in GATED_KINDS)
    return TileLoad(rounds, resident, rest, float(rest > 0), steps, gated, moved, read)


def load_microseconds(
    cost: TileCost, load: TileLoad, maximum: Callable[[Any, Any], Any] = max
) -> Any:
    """The time of a load; an array of times if the load holds arrays, with numpy's maximum."""
    step = load.rounds * maximum(cost.latency, load.resident * cost.step)
    step += load.partial * maximum(cost.latency, load.rest * cost.step)
    end = load.gated * cost.gated_end + (1 - load.gated) * cost.end
    compute = load.steps * step + (load.rounds + load.partial) * end
    memory, rest = load.moved / (cost.bandwidth * 1e6), load.read / (cost.reader * 1e6)
    return roofline(cost.launch, compute, memory, rest, _SHARPNESS, maximum)


def _resident(gpu: Gpu, work: TileWork) -> int:
    """Programs that run on a multiprocessor at once."""
    tile, variant = work.tile, variant_of(work.tile)
    if variant.descriptors:
        return tile.ctas
    held = variant.held_bytes(int(_OUTPUT_BYTES[work.kind]), tile, gpu) + _PROGRAM_BYTES
    by_threads = _MOST_THREADS // (32 * tile.warps)
    return max(1, min(gpu.shared_bytes // held, _MOST_PROGRAMS, by_threads))
