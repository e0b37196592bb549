"""`tpdet tune`: compile, measure, write the shape table of this GPU, try it as start-up will."""

import argparse
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tpdet.comm.device import driver_version
from tpdet.errors import UsageError
from tpdet.kernels.inputs.product import HEAD_ROWS, Product, read_roots
from tpdet.kernels.order import FOLD_ORDERS
from tpdet.tools.tune import EXPERTS, TUNED_KINDS
from tpdet.tools.tune.shapes import expert_layers, products_by_value
from tpdet.tools.verify.run import parse_row_layers, parse_sizes

if TYPE_CHECKING:
    from tpdet.tools.tune.experts import Expert, TunedLayer
    from tpdet.tools.tune.product import Tuned


def tune_command(options: argparse.Namespace) -> int:
    """Run `tpdet tune`. Raises UsageError on a machine without a GPU."""
    if not torch.cuda.is_available():
        raise UsageError(
            "tpdet tune measures GPU kernels and torch sees no GPU here: run it on the GPU that "
            "will serve (the CPU path has no shape table)"
        )
    from tpdet.kernels.cuda.gemm.choice.shape_table import table_path

    names = [options.model] if options.model else options.model_shape.split(",")
    kinds, rules = parse_kinds(options.kinds), parse_row_layers(options.row_layers)
    orders = parse_orders(options.fold_order)
    sizes = parse_sizes(options.tp)
    products, left_out = products_by_value(names, sizes, orders, rules)
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


def parse_orders(text: str) -> tuple[str, ...]:
    """Fold orders from a list of their names. Raises UsageError."""
    orders = tuple(text.split(","))
    if unknown := sorted({*orders} - {*FOLD_ORDERS}):
        raise UsageError(f"--fold-order {unknown[0]}: use a list of {', '.join(FOLD_ORDERS)}")
    return orders


def parse_kinds(text: str) -> frozenset[str]:
    """Kinds of products from a list of their names. Raises UsageError."""
    kinds = frozenset(text.split(","))
    if unknown := kinds - {*TUNED_KINDS}:
        raise UsageError(f"--kinds {sorted(unknown)[0]}: use a list of {', '.join(TUNED_KINDS)}")
    return kinds


def tune_products(
    products: Sequence[Product],
    effort: Effort,
    device: torch.device,
    path: Path,
    experts: Sequence["Expert"] = (),
) -> None:
    """Measure products and layers of experts on `device`, and write their table to `path`.

    Products are then checked as at a start; tiles of experts are as they are chosen.
    """
    from tpdet.kernels.cuda.gemm.admission import check
    from tpdet.kernels.cuda.gemm.choice.library import environment
    from tpdet.kernels.cuda.gemm.choice.shape_table import parse_table
    from tpdet.tools.tune.table_file import layers_in, products_in

    facts = environment(device) | {
        "capability": "{}.{}".format(*torch.cuda.get_device_capability(device)),
        "driver": str(driver_version()),
        "triton": metadata.version("triton"),
        "date": datetime.now(UTC).date().isoformat(),
    }
    if effort.missing:
        held, layers = products_in(path, facts), layers_in(path, facts)
        products = [product for product in products if product not in held]
        experts = [each for each in experts if each.layer not in layers]
        print(f"{len(products)} products to tune, {len(held)} in {path}")
        print(f"{len(experts)} layers of experts to tune, {len(layers)} in {path}")
    if experts:
        _tune_experts(experts, effort, device, path, facts)
    if not products:
        return
    tuned = _tune_all(products, effort, device, path, facts)
    begin = time.perf_counter()
    table = parse_table(path.read_text(encoding="utf-8"), str(path))
    found = check(tuned, device, {"column": effort.max_rows, "head": HEAD_ROWS}, table=table)
    torch.cuda.synchronize()
    print(f"start-up check of all of them: {found}; {time.perf_counter() - begin:.1f} s")
    print(path)


def buckets_of(product: Product, max_rows: int) -> tuple[int, ...]:
    """The buckets a product is tuned at."""
    from tpdet.kernels.cuda.gemm.choice.shape_table import BUCKETS

    most = min(max_rows, HEAD_ROWS) if product.kind == "head" else max_rows
    return tuple(bucket for bucket in BUCKETS if bucket <= most) or BUCKETS[:1]


def _tune_all(
    products: Sequence[Product],
    effort: Effort,
    device: torch.device,
    path: Path,
    facts: dict[str, str],
) -> list[Product]:
    """Tune each product and write the table after each; those that were tuned in time."""
    from tpdet.tools.tune.precompile import precompile
    from tpdet.tools.tune.table_file import write_table
    from tpdet.tools.tune.times_file import append_times

    begin = time.perf_counter()
    jobs = compile_jobs(products, effort.max_rows, device)
    failed = precompile(jobs, device)
    print(f"{len(jobs)} kernels compiled, {failed} refused; {time.perf_counter() - begin:.0f} s")
    ratios: list[tuple[float, str]] = []
    done: list[Product] = []
    waiting = groups(products)
    for number, group in enumerate(waiting, 1):
        spent = time.perf_counter() - begin
        if done and spent >= effort.seconds:
            print(f"{len(waiting) - number + 1} of {len(waiting)} not tuned in {spent:.0f} s")
            break
        for tuned in _tune_group(group, effort, device):
            write_table(path, facts, [tuned])
            ratios += _show(tuned)
            done.append(tuned.product)
        if effort.times is not None:
            append_times(effort.times, facts, tuned)
        print(f"  {number} of {len(waiting)}, {time.perf_counter() - begin:.0f} s", flush=True)
    worst = ", ".join(f"{ratio:.2f} {name}" for ratio, name in sorted(ratios, reverse=True)[:5])
    print(
        f"time over the peer's: geometric mean {geometric_mean(r for r, _ in ratios):.3f} of "
        f"{len(ratios)} cases, worst {worst}; {time.perf_counter() - begin:.0f} s"
    )
    return done


def _tune_experts(
    experts: "Sequence[Expert]",
    effort: Effort,
    device: torch.device,
    path: Path,
    facts: dict[str, str],
) -> None:
    """Tune each layer and write the table after each."""
    from tpdet.kernels.cuda.launch.compile_pool import compile_all
    from tpdet.kernels.cuda.launch.recording import recording
    from tpdet.tools.tune.experts import LayerTuner, step_sizes
    from tpdet.tools.tune.table_file import write_table

    begin, sizes = time.perf_counter(), step_sizes(effort.max_rows)
    for number, expert in enumerate(experts, 1):
        if number > 1 and time.perf_counter() - begin >= effort.seconds:
            print(f"{len(experts) - number + 1} of {len(experts)} layers of experts not tuned")
            return
        tuner = LayerTuner(expert, effort.repeats, device)
        with recording() as asked:
            tuner.record(sizes)
        failed = compile_all(asked.values(), len(os.sched_getaffinity(0)))
        spent = time.perf_counter() - begin
        print(f"{len(asked)} kernels compiled, {len(failed)} refused; {spent:.0f} s", flush=True)
        tuned = tuner.tune(sizes)
        write_table(path, facts, [], [tuned])
        _show_layer(tuned)
        del tuner
        torch.cuda.empty_cache()
        print(f"  {number} of {len(experts)}, {time.perf_counter() - begin:.0f} s", flush=True)
    print(path)


def _show_layer(tuned: "TunedLayer") -> None:
    """A line for each number of tokens: microseconds beside the static choice's and the least."""
    from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile

    print(tuned.expert.layer)
    for tokens, row in tuned.rows.items():
        tiles = f"{format_tile(row.tiles.gate_up)} / {format_tile(row.tiles.down)}"
        spread = ", spread" if row.tiles.spread else ""
        print(
            f"{tokens:6d} tokens: {row.us:8.2f} us, static {row.static_us:8.2f}, floor "
            f"{row.floor_us:8.2f}; {tiles}{spread}",
            flush=True,
        )
    for name in tuned.refused:
        print(f"  other bits, not used: {name}", flush=True)


def groups(products: Iterable[Product]) -> list[list[Product]]:
    """Products that are tuned together: those that differ in their roots only."""
    found: dict[Product, list[Product]] = {}
    for product in products:
        found.setdefault(replace(product, roots=""), []).append(product)
    return list(found.values())


def _tune_group(group: Sequence[Product], effort: Effort, device: torch.device) -> "list[Tuned]":
    from tpdet.tools.tune.leaves import LeafTuner
    from tpdet.tools.tune.product import ProductTuner

    buckets = buckets_of(group[0], effort.max_rows)
    if group[0].kind == "row":
        tuned = LeafTuner(group, max(buckets), effort.repeats, device).tune(buckets)
    else:
        tuned = [ProductTuner(group[0], max(buckets), effort.repeats, device).tune(buckets)]
    torch.cuda.empty_cache()
    return tuned


def _show(tuned: "Tuned") -> list[tuple[float, str]]:
    """Print a product's line; its ratios to the peer, named."""
    product, mine = tuned.product, {b: row.us / row.peer_us for b, row in tuned.rows.items()}
    marks = {b: f"{row.choice.library or ''}"[:1] for b, row in tuned.rows.items()}
    if product.kind == "row":
        marks = {b: f"/{row.choice.cut}" for b, row in tuned.rows.items()}
    line = " ".join(f"{bucket}:{ratio:.2f}{marks[bucket]}" for bucket, ratio in mine.items())
    print(f"{product!s:20s} {geometric_mean(mine.values()):.3f}  {line}", flush=True)
    for name, where in tuned.refused.items():
        print(f"  other bits, not used: {name} at {' '.join(where)} rows", flush=True)
    return [(ratio, f"{product} at {bucket}") for bucket, ratio in mine.items()]


def compile_jobs(products: Iterable[Product], max_rows: int, device: torch.device) -> set[tuple]:
    """Everything that tuning and the start-up check will launch."""
    from tpdet.kernels.cuda.gemm.admission import REFERENCE
    from tpdet.kernels.cuda.gemm.choice.candidates import column_candidates
    from tpdet.kernels.cuda.gemm.choice.static import column_tile
    from tpdet.kernels.cuda.gemm.choice.variants import variant_of

    properties = torch.cuda.get_device_properties(device)
    descriptors = (properties.major, properties.minor) >= (9, 0)
    sms = properties.multi_processor_count if descriptors else 0
    jobs = set(leaf_jobs((p for p in products if p.kind == "row"), max_rows, sms))
    for product in products:
        if product.kind == "row":
            continue
        n, k, wide = product.n, product.k, product.kind == "head"
        tiles = [REFERENCE.at(k)]
        for bucket in buckets_of(product, max_rows):
            tiles.append(column_tile(bucket, n, k, float32=False, wide_out=wide, sms=sms))
            tiles += column_candidates(bucket, n, k, kind=product.kind, descriptors=descriptors)
        jobs |= {
            (tile, product.kind, variant_of(tile).descriptors or n % tile.columns == 0)
            for tile in tiles
        }
    return jobs


def leaf_jobs(products: Iterable[Product], max_rows: int, sms: int) -> list[tuple]:
    """The same of row products; sms: 0 without descriptors. Kernels that roots share stand once."""
    from tpdet.kernels.cuda.gemm.admission import REFERENCE
    from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice
    from tpdet.tools.tune.leaves import bucket_choices

    found: dict[tuple, tuple] = {}
    for product in products:
        roots, reference = read_roots(product.roots), REFERENCE.at(product.k)
        found[product.leaves, reference] = roots, LeafChoice(1, "chain", reference)
        for bucket in buckets_of(product, max_rows):
            for work, choice in bucket_choices(product, roots, bucket, sms).items():
                found.setdefault((product.leaves, work), (roots, choice))
    return list(found.values())


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean logarithm."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))
