"""Tune products: at each bucket, the fastest tile, cut and library call that keep the bits.

Products that differ only in their roots share operands and measurements. Bits are compared with the
reference variant's at the bucket, and for tiles at the fewest rows of it too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.choice.shape_table import BUCKETS, ProductChoice
from tpdet.kernels.inputs.product import Product
from tpdet.tools.measurement.graph_times import enough
from tpdet.tools.tune.measure import first_in_class, full_us, quick_us

_GAIN = 0.985  # a library must beat the tile by so much: the tile serves every row count
_LARGE = 1024  # rows from which operands are let go at once

Run = Callable[[torch.Tensor], object]
"""By a weight that no cache holds."""


@dataclass(frozen=True)
class TunedCandidate:
    """What may run in a bucket. title: of what was refused; differs: by a kind of trial data."""

    choice: ProductChoice
    title: str
    run: Run
    differs: Callable[[str], bool]


class ProductOperands(Protocol):
    """Operands of products that differ in their roots only.

    cold: the weight and copies of it; finalists: tiles of a product that are measured in full.
    """

    products: tuple[Product, ...]
    cold: list[torch.Tensor]
    finalists: int

    def candidates(self, product: Product, bucket: int) -> dict[str, TunedCandidate]:
        """All candidates of a bucket; those of one name take one time, whatever the roots."""

    def peer(self, bucket: int) -> Run:
        """What stock engines run in the product's place."""


@dataclass(frozen=True)
class TunedRow:
    """What a bucket got: its choice and microseconds of it, of the best tile and of the peer."""

    choice: ProductChoice
    us: float
    tile_us: float
    peer_us: float


@dataclass
class TunedProduct:
    """Rows by bucket, and what was refused for other bits: by name, at which rows and data.

    times: microseconds of every candidate that ran, by bucket and name.
    """

    product: Product
    rows: dict[int, TunedRow] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)
    times: dict[int, dict[str, float]] = field(default_factory=dict)


def launches(operands: ProductOperands, buckets: Iterable[int]) -> Iterator[Callable[[], object]]:
    """Calls that launch every kernel which tuning measures; a library needs no compiler."""
    for bucket in buckets:
        for product in operands.products:
            for candidate in operands.candidates(product, bucket).values():
                if not candidate.choice.library:
                    yield partial(candidate.run, operands.cold[0])


def tune(operands: ProductOperands, buckets: Iterable[int], repeats: int) -> list[TunedProduct]:
    """Every bucket in turn, for each product."""
    tuned = [TunedProduct(product) for product in operands.products]
    for bucket in buckets:
        _tune_bucket(operands, bucket, repeats, tuned)
        if bucket >= _LARGE:
            torch.cuda.empty_cache()
    return tuned


def _tune_bucket(
    operands: ProductOperands, bucket: int, repeats: int, tuned: Sequence[TunedProduct]
) -> None:
    """Add a bucket's row and times to each product. Raises RuntimeError if no tile keeps bits."""
    cold = enough(operands.cold, bucket)
    candidates = [operands.candidates(one.product, bucket) for one in tuned]
    runs: dict[str, Run] = {}
    for named in candidates:
        for name, candidate in named.items():  # equal names run the same
            if not candidate.choice.library:
                runs.setdefault(name, candidate.run)
    times = quick_us(runs, cold)
    finalists = [
        _finalists(product, named, times, operands.finalists, bucket)
        for product, named in zip(tuned, candidates, strict=True)
    ]
    tried: dict[str, Run] = {}
    for names, named in zip(finalists, candidates, strict=True):
        for name in names:
            tried.setdefault(name, named[name].run)
    peer, *full = full_us([operands.peer(bucket), *tried.values()], cold, repeats)
    us = dict(zip(tried, full, strict=True))
    for product, names, named in zip(tuned, finalists, candidates, strict=True):
        product.rows[bucket] = _row({name: named[name].choice for name in names}, us, peer)
        product.times[bucket] = times | us


def _finalists(
    tuned: TunedProduct,
    candidates: dict[str, TunedCandidate],
    times: dict[str, float],
    most: int,
    bucket: int,
) -> list[str]:
    """The fastest tiles that keep the bits, then the library's ways that do."""

    def problem(name: str) -> str | None:
        wrong = [kind for kind in trial_data.KINDS if candidates[name].differs(kind)]
        kinds = "" if len(wrong) == len(trial_data.KINDS) else f" ({', '.join(wrong)})"
        return f"{bucket}{kinds}" if wrong else None

    tiles, refused = first_in_class((name for name in times if name in candidates), most, problem)
    ways = [name for name, one in candidates.items() if one.choice.library]
    ways, refused_ways = first_in_class(ways, len(ways), problem)
    for name, where in (refused | refused_ways).items():
        tuned.refused.setdefault(candidates[name].title, []).append(where)
    if not tiles:
        raise RuntimeError(f"{tuned.product} at {bucket} rows: no tile keeps the bits")
    return [*tiles, *ways]


def _row(choices: dict[str, ProductChoice], us: dict[str, float], peer: float) -> TunedRow:
    """The fastest tile, with the library beside it where that is faster by enough."""
    tile = min((name for name in choices if not choices[name].library), key=us.__getitem__)
    ways = [name for name in choices if choices[name].library]
    way = min(ways, key=us.__getitem__, default=tile)
    if way == tile or us[way] >= _GAIN * us[tile]:
        return TunedRow(choices[tile], us[tile], us[tile], peer)
    choice = replace(choices[tile], library=choices[way].library)
    return TunedRow(choice, us[way], us[tile], peer)


def fewest_rows(bucket: int) -> int:
    """One row more than the next smaller bucket has."""
    smaller = [rows for rows in BUCKETS if rows < bucket]
    return smaller[-1] + 1 if smaller else bucket
