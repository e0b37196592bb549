"""The shape table: for a product's shape and row bucket, the fastest admitted variant.

One JSON file a GPU (`shape_tables/<gpu>.json`), written by `tpdet tune`, committed with the
environment that admitted it:

    {"format": 2, "environment": {"gpu": ..., "torch": ..., "cublas": ..., ...},
     "products": [{"kind": "column", "n": 6144, "k": 4096, "leaves": 1, "dtype": "bfloat16",
                   "rows": {"64": {"tile": "64x64x128 w4 s4 swap", "library": "mm", ...}}}],
     "experts": [...]}

kind: `column` (output in the model's dtype), `head` (output fp32), `gated` (interleaved gate and up
rows, output their activation in the model's dtype), `row` (leaves of width k, the
rank's `roots` over them, and a `cut` and its `kernel` beside the tile). A tile serves every row
count of its bucket. A library serves the bucket's own row count, and rows padded up to it where the
pad is small. experts: layers of experts, as in `expert_entries.py`.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tpdet.kernels.cuda.gemm.choice.expert_entries import LayerTiles, parse_layers
from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice
from tpdet.kernels.cuda.gemm.choice.library import LIBRARIES
from tpdet.kernels.cuda.gemm.choice.tile_text import parse_tile
from tpdet.kernels.cuda.gemm.choice.variants import KERNELS, VARIANTS
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import file_name
from tpdet.kernels.inputs.experts import ExpertLayer
from tpdet.kernels.inputs.product import KINDS, Product, read_roots, write_roots
from tpdet.kernels.order import Expression, operands

FORMAT = 2
FOLDER = Path(__file__).resolve().parent / "shape_tables"
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
"""Rows at which variants are measured; decode graphs run at those up to 256."""

_PAD_FROM = 256  # rows; with fewer, a copy costs more than the library gains
_PAD_SHARE = 8  # at most this part of a bucket may be pad rows


@dataclass(frozen=True)
class ProductChoice:
    """What runs in one bucket: `tile` at any row count; `library` at the bucket's own, if named.

    cut, kernel: of a `row` product, as in LeafChoice; 0 and empty for the others.
    """

    bucket: int
    tile: Tile
    library: str | None = None
    cut: int = 0
    kernel: str = ""

    @property
    def leaf_choice(self) -> LeafChoice:
        """The choice of a `row` product without its bucket."""
        return LeafChoice(self.cut, self.kernel, self.tile)


@dataclass(frozen=True)
class ShapeTable:
    """Choices by product and bucket, and the environment in which they were admitted.

    experts: tiles of layers of experts, by tokens of a step.
    """

    environment: Mapping[str, str]
    products: Mapping[Product, Mapping[int, ProductChoice]]
    experts: Mapping[ExpertLayer, Mapping[int, LayerTiles]] = field(default_factory=dict)


@dataclass(frozen=True)
class Admitted:
    """What start-up tried and found in the bit class: the value that products are called with.

    The arithmetic of the layers holds it (`Arithmetic.admitted`); without one, the static
    choice runs.
    """

    products: Mapping[Product, Mapping[int, ProductChoice]]

    def choice(self, kind: str, x: torch.Tensor, n: int) -> ProductChoice | None:
        """What runs x [M, K] times a weight [n, K] of a kind; None: the static choice."""
        if x.dtype != torch.bfloat16:
            return None
        choices = self.products.get(Product(kind, n, x.shape[1]))
        return None if choices is None else choices[bucket_of(x.shape[0], choices)]

    def leaf_choice(
        self, x: torch.Tensor, n: int, leaves: int, roots: tuple[Expression, ...]
    ) -> LeafChoice | None:
        """What runs x [M, leaves * k] times [leaves, n, k]; None: the static choice."""
        if x.dtype != torch.bfloat16:
            return None
        product = Product("row", n, x.shape[1] // leaves, leaves, write_roots(roots))
        choices = self.products.get(product)
        return None if choices is None else choices[bucket_of(x.shape[0], choices)].leaf_choice


def bucket_of(m: int, buckets: Iterable[int] = BUCKETS) -> int:
    """The smallest bucket that holds `m` rows; the largest one for more."""
    ordered = sorted(buckets)
    return ordered[min(bisect_left(ordered, m), len(ordered) - 1)]


def library_rows(m: int, bucket: int) -> int | None:
    """The tested row count at which a library may compute `m` rows: the bucket, or None."""
    if m == bucket:
        return bucket
    small = 0 < bucket - m <= bucket // _PAD_SHARE
    return bucket if small and bucket >= _PAD_FROM else None


def table_path(gpu: str, folder: Path = FOLDER) -> Path:
    """Where the table of a GPU stands: "NVIDIA H200" -> shape_tables/nvidia-h200.json."""
    return folder / f"{file_name(gpu)}.json"


def load_table(gpu: str, folder: Path = FOLDER) -> ShapeTable | None:
    """The committed table of a GPU; None if there is none. Raises ValueError for a damaged one."""
    path = table_path(gpu, folder)
    if not path.exists():
        return None
    table = parse_table(path.read_text(encoding="utf-8"), str(path))
    return table if table.environment.get("gpu") == gpu else None


@cache
def tuned_experts(gpu: str) -> Mapping[ExpertLayer, Mapping[int, LayerTiles]]:
    """Layers of experts in the committed table of a GPU, read once. Raises as `load_table`."""
    table = load_table(gpu) if gpu else None
    return {} if table is None else table.experts


def parse_table(text: str, file: str) -> ShapeTable:
    """A table from its JSON text. Raises ValueError naming the file and what is wrong in it."""
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, this code reads {FORMAT}")
        environment = {str(name): str(value) for name, value in data["environment"].items()}
        products = {_product(entry): _choices(entry) for entry in data["products"]}
        if len(products) != len(data["products"]):
            raise ValueError("a product stands there twice")
        experts = parse_layers(data.get("experts", ()))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file}: {error!r}: write it anew with tpdet tune") from error
    return ShapeTable(environment, products, experts)


def _product(entry: Mapping[str, Any]) -> Product:
    n, k, leaves = (entry[name] for name in ("n", "k", "leaves"))
    sizes = [value for value in (n, k, leaves) if isinstance(value, int) and value > 0]
    if entry["kind"] not in KINDS or len(sizes) != 3 or entry["dtype"] != "bfloat16":
        raise ValueError(f"no product: {entry['kind']!r} {n} {k} {leaves} {entry['dtype']!r}")
    roots = str(entry["roots"]) if entry["kind"] == "row" else ""
    if entry["kind"] == "row":
        read = [leaf for root in read_roots(roots) for leaf in operands(root)]
        if read != list(range(leaves)):
            raise ValueError(f"roots {roots!r} are not over {leaves} leaves")
    return Product(str(entry["kind"]), n, k, leaves, roots)


def _choices(product: Mapping[str, Any]) -> dict[int, ProductChoice]:
    found = {}
    for bucket, entry in product["rows"].items():
        library, row = entry.get("library"), product["kind"] == "row"
        if int(bucket) not in BUCKETS or library not in (None, *LIBRARIES):
            raise ValueError(f"rows {bucket}, library {library!r}")
        cut, kernel = (entry["cut"], entry["kernel"]) if row else (0, "")
        if row and (type(cut) is not int or cut < 1 or kernel not in KERNELS or library):
            raise ValueError(f"rows {bucket}, cut {cut!r}, kernel {kernel!r}, library {library!r}")
        choice = ProductChoice(int(bucket), parse_tile(entry["tile"]), library, cut, kernel)
        if choice.tile.variant not in VARIANTS:
            raise ValueError(f"rows {bucket}, {entry['tile']} is a tile of experts")
        found[int(bucket)] = choice
    if not found:
        raise ValueError("a product without rows")
    return dict(sorted(found.items()))
