"""Start-up check of the shape table: what it names for this model is tried, then admitted.

Every tile, cut and library product that the model's shapes will use is compared in bytes with the
reference variant (leaves: every one apart) on three kinds of data. One that differs, or does not
run, stops the start: it is never replaced silently. A product that is not in the table gets choices
by estimate, which are tried all the same; before Hopper it runs on the static choice. Either is
reported. Library entries count only in the environment that admitted them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm import leaf_trials, trial_data
from tpdet.kernels.cuda.gemm.choice import shape_table
from tpdet.kernels.cuda.gemm.choice.estimate import estimated_choices
from tpdet.kernels.cuda.gemm.choice.library import environment, library_product
from tpdet.kernels.cuda.gemm.choice.shape_table import (
    Admitted,
    ProductChoice,
    ShapeTable,
    bucket_of,
)
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.cuda.gemm.column import column_gemm
from tpdet.kernels.cuda.gemm.gated import gated_gemm, gated_library_product
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.pointwise.activation import activate_and_multiply
from tpdet.kernels.inputs.activations import GATED_KINDS
from tpdet.kernels.inputs.product import Product, read_roots

REFERENCE = Tile(64, 64, 64, 4, 3)
"""What every other tile is compared with: the plainest member of the class."""

Result = TypeVar("Result")
Flags = dict[str, torch.Tensor | str]
"""By name of a trial: whether its bytes differ, on the device, or why it did not run."""


@dataclass(frozen=True)
class Admission:
    """What start-up found: the entries that it tried and admits, and what runs without the table.

    not_in_table: products whose choices are estimated, or static where nothing is estimated.
    library_off: why library entries are not used; None if they are.
    """

    admitted: Admitted
    not_in_table: tuple[Product, ...]
    library_off: str | None

    @property
    def tried(self) -> int:
        """Entries that were tried."""
        return sum(map(len, self.admitted.products.values()))

    def __str__(self) -> str:
        parts = [f"{self.tried} entries of the shape table admitted"]
        if self.not_in_table:
            names = ", ".join(map(str, self.not_in_table))
            parts.append(f"not in the table, by estimate: {names}")
        if self.library_off:
            parts.append(f"no library products: {self.library_off}")
        return "; ".join(parts)


def check(
    products: Iterable[Product],
    device: torch.device,
    limits: Mapping[str, int],
    dtype: torch.dtype = torch.bfloat16,
    table: ShapeTable | None = None,
) -> Admission:
    """Try what the table names for `products`; what it admits is for the products to be called by.

    limits: the most rows that a "head" meets, and any other product ("column").
    `table`: the GPU's committed one if None.
    Raises RuntimeError naming each entry that leaves the bit class, ValueError for a damaged table.
    """
    table = _table(device, dtype, table)
    off = None if table is None else environment_difference(table, device)
    entries, missing = _entries(products, table, limits, library=off is None)
    named = table is not None and any(
        choice.library for product in entries for choice in table.products[product].values()
    )
    used = entries | _estimated(missing, limits, device, dtype)
    failed = failing_entries(used, device)
    if failed:
        raise RuntimeError(
            f"{'; '.join(failed)}: other bits than the reference variant on this GPU; write the "
            "shape table anew with tpdet tune, or remove it"
        )
    return Admission(Admitted(used), missing, off if named else None)


def rehearse(
    products: Iterable[Product],
    device: torch.device,
    limits: Mapping[str, int],
    dtype: torch.dtype = torch.bfloat16,
    table: ShapeTable | None = None,
) -> None:
    """Launch each kernel that `check` would, on one kind of data; nothing is judged or admitted.

    Raises ValueError for a damaged table.
    """
    used = foreseen(products, device, limits, dtype, table).products
    if used:
        failing_entries(used, device, trial_data.KINDS[:1])
        for product in used:
            if product.gated:  # what follows a library's product
                rows = torch.empty(1, product.n, device=device)
                activate_and_multiply(rows, dtype, GATED_KINDS[product.kind])


def _entries(
    products: Iterable[Product], table: ShapeTable | None, limits: Mapping[str, int], library: bool
) -> tuple[dict[Product, dict[int, ProductChoice]], tuple[Product, ...]]:
    """What the table has for the row counts that products meet, and the products that it lacks.

    library: with library products. Products of unequal leaves are in neither: one variant computes
    them.
    """
    equal = sorted({product for product in products if not product.widths})
    entries = {}
    for product in equal:
        if table is not None and (choices := table.products.get(product)):
            last = bucket_of(most_rows(product, limits), choices)
            entries[product] = {
                bucket: choice if library else replace(choice, library=None)
                for bucket, choice in choices.items()
                if bucket <= last
            }
    return entries, tuple(product for product in equal if product not in entries)


def foreseen(
    products: Iterable[Product],
    device: torch.device,
    limits: Mapping[str, int],
    dtype: torch.dtype = torch.bfloat16,
    table: ShapeTable | None = None,
) -> Admitted:
    """What `check` will admit, without library products; for a rehearsal, since nothing was tried.

    Raises ValueError for a damaged table.
    """
    entries, missing = _entries(products, _table(device, dtype, table), limits, library=False)
    return Admitted(entries | _estimated(missing, limits, device, dtype))


def _table(device: torch.device, dtype: torch.dtype, given: ShapeTable | None) -> ShapeTable | None:
    """The table in use: the one given, else the GPU's; None for activations it says nothing of."""
    if dtype != torch.bfloat16:
        return None
    if given is not None:
        return given
    name = hardware.gpu_of(device).name or torch.cuda.get_device_name(device)
    return shape_table.load_table(name)


def _estimated(
    products: Iterable[Product], limits: Mapping[str, int], device: torch.device, dtype: torch.dtype
) -> dict[Product, dict[int, ProductChoice]]:
    """Choices for products that no table holds; empty where none are estimated."""
    gpu = hardware.gpu_of(device)
    if dtype != torch.bfloat16 or not gpu.wgmma:
        return {}
    found = {
        product: estimated_choices(product, most_rows(product, limits), gpu) for product in products
    }
    return {product: choices for product, choices in found.items() if choices}


def most_rows(product: Product, limits: Mapping[str, int]) -> int:
    """The most rows that a product meets: limits are of a "head" and of any other ("column")."""
    return limits["head" if product.kind == "head" else "column"]


def environment_difference(table: ShapeTable, device: torch.device) -> str | None:
    """The first way in which this environment is not the table's; None if a library may run."""
    here = environment(device)
    if here["cublas"] == "unknown":
        return "cuBLAS does not tell its version"
    for name, value in here.items():
        if table.environment.get(name) != value:
            return f"{name} is {value!r}, the table has {table.environment.get(name)!r}"
    return None


def failing_entries(
    used: Mapping[Product, Mapping[int, ProductChoice]],
    device: torch.device,
    kinds: Sequence[str] = trial_data.KINDS,
) -> list[str]:
    """Entries that differ from the reference variant, or do not run, on any kind of data."""
    flags: Flags = {}
    for kind in kinds:
        rows: dict[int, torch.Tensor] = {}
        for product in sorted(used):
            most, width = max(used[product]), product.leaves * product.k
            if width not in rows or len(rows[width]) < most:
                rows[width] = trial_data.trial_rows(kind, most, width, device)
            try_kind = _try_row_product if product.kind == "row" else _try_product
            try_kind(product, used[product], rows[width], kind, flags)
    failed = [f"{name} ({why})" for name, why in flags.items() if isinstance(why, str)]
    names = [name for name, flag in flags.items() if not isinstance(flag, str)]
    if names:
        wrong = torch.stack([flags[name] for name in names]).tolist()  # type: ignore[misc]
        failed += [name for name, found in zip(names, wrong, strict=True) if found]
    torch.cuda.empty_cache()
    return failed


def _try_product(
    product: Product,
    choices: Mapping[int, ProductChoice],
    rows: torch.Tensor,
    kind: str,
    flags: Flags,
) -> None:
    """Tiles and libraries of a product of one leaf."""
    weight = trial_data.trial_weight(kind, product.n, product.k, rows.device)
    base = weight[: trial_data.BASE_ROWS]
    whole = by_tile(product.kind, rows[: max(choices)], base, REFERENCE.at(product.k))
    for bucket, choice in choices.items():
        x, wanted = rows[:bucket], whole[:bucket]
        name = f"{product}, {bucket} rows, {{}}, {kind} data"
        tile = format_tile(choice.tile)
        runs = {tile: partial(by_tile, product.kind, x, weight, choice.tile)}
        if choice.library:
            way = choice.library
            runs[f"library {way}"] = partial(by_library, product.kind, x, weight, way)
        for what, run in runs.items():
            _try(flags, name.format(what), run, trial_data.differs, wanted)


def _try_row_product(
    product: Product,
    choices: Mapping[int, ProductChoice],
    rows: torch.Tensor,
    kind: str,
    flags: Flags,
) -> None:
    """Cuts of a row product, against every leaf apart."""
    weight, roots = leaf_trials.trial_leaves(kind, product, rows.device), read_roots(product.roots)
    whole = leaf_trials.wanted_roots(rows[: max(choices)], weight, product, REFERENCE)
    for bucket, choice in choices.items():
        what = f"cut {choice.cut} {choice.kernel} {format_tile(choice.tile)}"
        x, wanted = rows[:bucket], whole[:, :bucket]
        run = partial(leaf_gemm.leaf_sums, x, weight, roots, choice.leaf_choice)
        name = f"{product}, {bucket} rows, {what}, {kind} data"
        _try(flags, name, run, leaf_trials.differs, wanted)


def _try(
    flags: Flags,
    name: str,
    run: Callable[[], Result],
    differs: Callable[[Result, torch.Tensor], torch.Tensor],
    wanted: torch.Tensor,
) -> None:
    try:
        flags[name] = differs(run(), wanted)
    except torch.OutOfMemoryError:
        raise  # it says nothing of the choice
    except Exception as error:
        flags[name] = f"{type(error).__name__}: {str(error)[:120]}"


def by_tile(kind: str, x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The result of a product of one leaf, x [M, K] times weight [N, K], by a tile."""
    if kind in GATED_KINDS:
        return gated_gemm(x, weight, tile, activation=GATED_KINDS[kind])
    return column_gemm(x, weight, None, _output_dtype(kind), tile)


def by_library(kind: str, x: torch.Tensor, weight: torch.Tensor, way: str) -> torch.Tensor:
    """The same by the library, at M rows."""
    if kind in GATED_KINDS:
        return gated_library_product(x, weight, len(x), way, GATED_KINDS[kind])
    return library_product(x, weight, _output_dtype(kind), len(x), way)


def _output_dtype(kind: str) -> torch.dtype:
    """bf16 of a column product, fp32 of a head."""
    return torch.float32 if kind == "head" else torch.bfloat16
