"""Library products for shapes that no table holds: tried, then timed beside the estimated tile.

No estimate knows which kernel the library takes at a shape. So start-up compares its bytes with the
reference variant's at each bucket where it may win, on all kinds of data, and admits it where it is
faster than the tile here. The bits are equal, so ranks may differ in what they admit.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch

from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.admission import REFERENCE, by_library, by_tile
from tpdet.kernels.cuda.gemm.choice.library import library_ways
from tpdet.kernels.cuda.gemm.choice.shape_table import Admitted, ProductChoice
from tpdet.kernels.inputs.product import Product

FEWEST_ROWS = 48  # with fewer, tiles win at every shape that was tuned
_GAIN = 0.97  # of the tile's time, at most: a tile serves every row count
_REPEATS = 5
_FLUSHED_BYTES = 128 << 20  # written before each run: more than the L2 cache of any GPU
_AHEAD = 64  # writes of that, 2 ms or more

Run = Callable[[], object]
Timer = Callable[[list[Run]], list[float]]
"""Median times of runs, each from an L2 cache without their operands."""


def with_libraries(
    admitted: Admitted,
    estimated: Iterable[Product],
    device: torch.device,
    timer: Timer | None = None,
) -> Admitted:
    """What was admitted, with the library in it where it wins for `estimated` products."""
    products = dict(admitted.products)
    for product in estimated:
        if product.kind != "row" and product in products:
            found = products[product]
            products[product] = _with_library(product, found, device, timer or median_ms)
    return Admitted(products)


def _with_library(
    product: Product, choices: Mapping[int, ProductChoice], device: torch.device, timer: Timer
) -> dict[int, ProductChoice]:
    ways = {bucket: library_ways(product, bucket) for bucket in choices if bucket >= FEWEST_ROWS}
    ways = {bucket: each for bucket, each in ways.items() if each}
    for kind in reversed(trial_data.KINDS):  # of the first kind, the operands are timed too
        if not ways:
            return dict(choices)
        rows = trial_data.trial_rows(kind, max(ways), product.k, device)
        weight = trial_data.trial_weight(kind, product.n, product.k, device)
        base = weight[: trial_data.BASE_ROWS]
        whole = by_tile(product.kind, rows, base, REFERENCE.at(product.k))
        ways = {
            bucket: kept
            for bucket, each in ways.items()
            if (kept := _same_bits(product.kind, rows[:bucket], weight, whole[:bucket], each))
        }
    found = dict(choices)
    for bucket, each in ways.items():
        x, choice = rows[:bucket], choices[bucket]
        runs: list[Run] = [partial(by_tile, product.kind, x, weight, choice.tile)]
        runs += [partial(by_library, product.kind, x, weight, way) for way in each]
        tile, *times = timer(runs)
        fastest = min(times)
        if fastest < _GAIN * tile:
            found[bucket] = replace(choice, library=each[times.index(fastest)])
    return found


def _same_bits(
    kind: str, x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor, ways: tuple[str, ...]
) -> tuple[str, ...]:
    """The ways that run and give the wanted bytes."""
    found = []
    for way in ways:
        try:
            if not bool(trial_data.differs(by_library(kind, x, weight, way), wanted)):
                found.append(way)
        except RuntimeError:  # a way that does not exist for this shape
            continue
    return tuple(found)


def median_ms(runs: list[Run]) -> list[float]:
    """Median milliseconds of each run on the current GPU, in turn."""
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    events = []
    for _ in range(_AHEAD):  # the host launches all runs meanwhile, so that none waits for it
        flushed.zero_()
    for _ in range(_REPEATS):
        for run in runs:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.zero_()
            begin.record()
            run()
            end.record()
            events.append((begin, end))
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in events]
    return [statistics.median(times[at :: len(runs)]) for at in range(len(runs))]
