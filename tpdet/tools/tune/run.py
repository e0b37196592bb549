"""`tpdet tune`: compile, measure, write the shape table of this GPU, try it as start-up will."""

import argparse
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean

import torch

from tpdet.comm.device import driver_version
from tpdet.kernels.cuda.gemm.admission import check
from tpdet.kernels.cuda.gemm.choice.library import environment
from tpdet.kernels.cuda.gemm.choice.shape_table import BUCKETS, parse_table, table_path
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.inputs.product import HEAD_ROWS, Product
from tpdet.kernels.order import FOLD_ORDERS
from tpdet.tools.tune import EXPERTS, TUNED_KINDS
from tpdet.tools.tune.column_operands import ColumnOperands
from tpdet.tools.tune.experts import Expert, LayerTuner, TunedLayer, step_sizes
from tpdet.tools.tune.leaf_operands import LeafOperands
from tpdet.tools.tune.measure import compile_all_of
from tpdet.tools.tune.products import TunedProduct, launches, tune
from tpdet.tools.tune.shapes import expert_layers, products_by_value
from tpdet.tools.tune.table_file import append_times, layers_in, products_in, write_table
from tpdet.tools.worlds.lists import parse_names, parse_row_layers, parse_sizes


def tune_command(options: argparse.Namespace) -> int:
    """Run `tpdet tune` on a machine with a GPU. Raises UsageError."""
    names = [options.model] if options.model else options.model_shape.split(",")
    kinds, rules = parse_names("--kinds", options.kinds, TUNED_KINDS), options.row_layers
    orders = parse_names("--fold-order", options.fold_order, FOLD_ORDERS)
    sizes = parse_sizes(options.tp)
    products, left_out = products_by_value(names, sizes, orders, parse_row_layers(rules))
    products = tuple(product for product in products if product.kind in kinds)
    experts = expert_layers(names, sizes) if EXPERTS in kinds else ()
    for line in left_out:
        print(f"left out: {line}")
    device = torch.device("cuda", torch.cuda.current_device())
    path: Path = options.output or table_path(torch.cuda.get_device_name(device))
    effort = Effort(
        options.max_rows, options.repeats, options.seconds, options.times, options.missing
    )
    tune_products(products, effort, device, path, experts)
    return 0


@dataclass(frozen=True)
class Effort:
    """Most rows of a step, replays of each finalist, seconds after which no product begins.

    times: a file to which all measured times are added; None: they are not kept. missing: leave out
    what the table holds already.
    """

    max_rows: int
    repeats: int
    seconds: float = math.inf
    times: Path | None = None
    missing: bool = False


def tune_products(
    products: Sequence[Product],
    effort: Effort,
    device: torch.device,
    path: Path,
    experts: Sequence[Expert] = (),
) -> None:
    """Measure products and layers of experts on `device`, and write their table to `path`.

    Products are then checked as at a start; tiles of experts are as they are chosen.
    """
    facts = environment(device) | {
        "capability": "{}.{}".format(*torch.cuda.get_device_capability(device)),
        "driver": str(driver_version()),
        "triton": metadata.version("triton"),
        "date": datetime.now(UTC).date().isoformat(),
    }
    if effort.missing:
        known, layers = products_in(path, facts), layers_in(path, facts)
        products = [product for product in products if product not in known]
        experts = [expert for expert in experts if expert.layer not in layers]
        print(f"{len(products)} products to tune, {len(known)} in {path}")
        print(f"{len(experts)} layers of experts to tune, {len(layers)} in {path}")
    tuning = _Tuning(effort, device, path, facts)
    if experts:
        tuning.experts(experts)
    if not products:
        return
    tuned = tuning.products(products)
    begin = time.perf_counter()
    table = parse_table(path.read_text(encoding="utf-8"), str(path))
    admission = check(tuned, device, {"column": effort.max_rows, "head": HEAD_ROWS}, table=table)
    torch.cuda.synchronize()
    print(f"start-up check of all of them: {admission}; {time.perf_counter() - begin:.1f} s")
    print(path)


def buckets_of(product: Product, max_rows: int) -> tuple[int, ...]:
    """The buckets a product is tuned at."""
    most = min(max_rows, HEAD_ROWS) if product.kind == "head" else max_rows
    return tuple(bucket for bucket in BUCKETS if bucket <= most) or BUCKETS[:1]


def groups(products: Iterable[Product]) -> list[list[Product]]:
    """Products that are tuned together: those that differ in their roots only."""
    alike: dict[Product, list[Product]] = {}
    for product in products:
        alike.setdefault(replace(product, roots=""), []).append(product)
    return list(alike.values())


@dataclass(frozen=True)
class _Tuning:
    """Where tables are written, by which effort, on which device, and its facts."""

    effort: Effort
    device: torch.device
    path: Path
    facts: dict[str, str]

    def products(self, products: Sequence[Product]) -> list[Product]:
        """Tune each product and write the table after each; those that were tuned in time."""
        begin, effort = time.perf_counter(), self.effort
        ratios: list[tuple[float, str]] = []
        done: list[Product] = []
        waiting = groups(products)
        for number, group in enumerate(waiting, 1):
            spent = time.perf_counter() - begin
            if done and spent >= effort.seconds:
                print(f"{len(waiting) - number + 1} of {len(waiting)} not tuned in {spent:.0f} s")
                break
            for tuned in self._group(group):
                write_table(self.path, self.facts, [tuned])
                ratios += _show(tuned)
                done.append(tuned.product)
            if effort.times is not None:
                append_times(effort.times, self.facts, tuned)
            print(f"  {number} of {len(waiting)}, {time.perf_counter() - begin:.0f} s", flush=True)
        worst = ", ".join(f"{ratio:.2f} {name}" for ratio, name in sorted(ratios, reverse=True)[:5])
        print(
            f"time over the peer's: geometric mean {geometric_mean(r for r, _ in ratios):.3f} of "
            f"{len(ratios)} cases, worst {worst}; {time.perf_counter() - begin:.0f} s"
        )
        return done

    def _group(self, group: Sequence[Product]) -> list[TunedProduct]:
        buckets = buckets_of(group[0], self.effort.max_rows)
        make = LeafOperands if group[0].kind == "row" else ColumnOperands
        operands = make(group, max(buckets), self.device)
        _compile(launches(operands, buckets))
        tuned = tune(operands, buckets, self.effort.repeats)
        torch.cuda.empty_cache()
        return tuned

    def experts(self, experts: Sequence[Expert]) -> None:
        """Tune each layer and write the table after each."""
        begin, sizes = time.perf_counter(), step_sizes(self.effort.max_rows)
        for number, expert in enumerate(experts, 1):
            if number > 1 and time.perf_counter() - begin >= self.effort.seconds:
                print(f"{len(experts) - number + 1} of {len(experts)} layers of experts not tuned")
                return
            tuner = LayerTuner(expert, self.effort.repeats, self.device)
            _compile(tuner.launches(sizes))
            tuned = tuner.tune(sizes)
            write_table(self.path, self.facts, [], [tuned])
            _show_layer(tuned)
            del tuner
            torch.cuda.empty_cache()
            print(f"  {number} of {len(experts)}, {time.perf_counter() - begin:.0f} s", flush=True)
        print(self.path)


def _compile(calls: Iterable[Callable[[], object]]) -> None:
    begin = time.perf_counter()
    count, refused = compile_all_of(calls)
    spent = time.perf_counter() - begin
    print(f"{count} kernels compiled, {refused} refused; {spent:.0f} s", flush=True)


def _show_layer(tuned: TunedLayer) -> None:
    """A line for each number of tokens: microseconds beside the static choice's and the least."""
    print(tuned.expert.layer)
    for tokens, row in tuned.rows.items():
        tiles = f"{format_tile(row.tiles.gate_up)} / {format_tile(row.tiles.down)}"
        spread = ", spread" if row.tiles.by_token else ""
        print(
            f"{tokens:6d} tokens: {row.us:8.2f} us, static {row.static_us:8.2f}, floor "
            f"{row.floor_us:8.2f}; {tiles}{spread}",
            flush=True,
        )
    for name in tuned.refused:
        print(f"  other bits, not used: {name}", flush=True)


def _show(tuned: TunedProduct) -> list[tuple[float, str]]:
    """Print a product's line; its ratios to the peer, named."""
    product, ratios = tuned.product, {b: row.us / row.peer_us for b, row in tuned.rows.items()}
    marks = {b: f"{row.choice.library or ''}"[:1] for b, row in tuned.rows.items()}
    if product.kind == "row":
        marks = {b: f"/{row.choice.cut}" for b, row in tuned.rows.items()}
    line = " ".join(f"{bucket}:{ratio:.2f}{marks[bucket]}" for bucket, ratio in ratios.items())
    print(f"{product!s:20s} {geometric_mean(ratios.values()):.3f}  {line}", flush=True)
    for name, where in tuned.refused.items():
        print(f"  other bits, not used: {name} at {' '.join(where)} rows", flush=True)
    return [(ratio, f"{product} at {bucket}") for bucket, ratio in ratios.items()]
