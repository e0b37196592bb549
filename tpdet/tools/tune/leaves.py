"""Tune row products: cut, kernel and tile of leaf sums, measured with the kernel that reads them.

Products that differ only in their roots share operands and measurements: what a choice costs hangs
on the subtrees that it folds and on how many sums are left. The reader is `fold_and_norm` over all
of them as one root, on a rank of several too: its exchange reads as many. The peer is cuBLAS, and
the residual and norm of its rounded result. Bits are compared with every leaf apart.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm import leaf_trials, trial_data
from tpdet.kernels.cuda.gemm.admission import REFERENCE
from tpdet.kernels.cuda.gemm.choice.leaf_choice import (
    LeafChoice,
    cut_roots,
    leaf_candidates,
    leaf_choice,
)
from tpdet.kernels.cuda.gemm.choice.shape_table import Choice
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm, root_form
from tpdet.kernels.cuda.pointwise import norm
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.inputs.product import Product, read_roots
from tpdet.kernels.order import Expression, fold_tree
from tpdet.kernels.partial_sums import PartialSums
from tpdet.tools.bench.kernels.timing import capture, enough, interleaved_us, rotated
from tpdet.tools.tune.product import Row, Tuned, fewest_rows, quick_us

_FINALISTS = 3  # choices a product that are measured in full
_LARGE = 1024  # rows from which operands are let go at once
_EPS = 1e-6

Work = tuple[RootForm | None, str, str]
"""What a choice runs, whatever the roots: subtrees, kernel, tile."""


class LeafTuner:
    """Operands of row products that differ in their roots only."""

    def __init__(
        self, products: Sequence[Product], most_rows: int, repeats: int, device: torch.device
    ) -> None:
        """Draw operands for up to `most_rows` rows."""
        self.products, self._repeats = tuple(products), repeats
        first = self.products[0]
        self._roots = {product: read_roots(product.roots) for product in self.products}
        self._rows = {
            kind: trial_data.trial_rows(kind, most_rows, first.leaves * first.k, device)
            for kind in trial_data.KINDS
        }
        self._weights = {
            kind: leaf_trials.trial_leaves(kind, first, device) for kind in trial_data.KINDS
        }
        self._wanted = {
            (product, kind): leaf_trials.wanted_roots(x, self._weights[kind], product, REFERENCE)
            for product in self.products
            for kind, x in self._rows.items()
        }
        self._cold = rotated(self._weights["random"])
        self._residual = torch.randn(most_rows, first.n, device=device)
        self._norm_weight = torch.ones(first.n, dtype=torch.bfloat16, device=device)
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        if torch.cuda.get_device_capability(device) < (9, 0):
            self._sms = 0

    def tune(self, buckets: Iterable[int]) -> list[Tuned]:
        """Every bucket in turn, for each product."""
        tuned = [Tuned(product) for product in self.products]
        for bucket in buckets:
            times: dict[Work, float] = {}
            rows = self._tune_bucket(bucket, {t.product: t.refused for t in tuned}, times)
            named = {work_title(work): us for work, us in times.items()}
            for entry in tuned:
                entry.rows[bucket], entry.times[bucket] = rows[entry.product], named
            if bucket >= _LARGE:
                torch.cuda.empty_cache()
        return tuned

    def _tune_bucket(
        self,
        bucket: int,
        refused: dict[Product, dict[str, list[str]]],
        measured: dict[Work, float],
    ) -> dict[Product, Row]:
        choices = {
            product: bucket_choices(product, self._roots[product], bucket, self._sms)
            for product in self.products
        }
        quick = self._quick(bucket, choices)
        finalists = {
            product: self._in_class(bucket, product, mine, quick, refused[product])
            for product, mine in choices.items()
        }
        tried: dict[Work, Callable[[torch.Tensor], object]] = {}
        for product, mine in finalists.items():
            for work, choice in mine.items():
                tried.setdefault(work, self._run(bucket, product, choice))
        peer, *times = self._full(bucket, list(tried.values()))
        us = dict(zip(tried, times, strict=True))
        measured |= quick | us
        found = {}
        for product, mine in finalists.items():
            work = min(mine, key=lambda work: us[work])
            choice = mine[work]
            entry = Choice(bucket, choice.tile, None, choice.cut, choice.kernel)
            found[product] = Row(entry, us[work], us[work], peer)
        return found

    def _quick(
        self, bucket: int, choices: dict[Product, dict[Work, LeafChoice]]
    ) -> dict[Work, float]:
        """Microseconds of all work that runs here."""
        found: dict[Work, float] = {}
        tried: set[Work] = set()
        cold = enough(self._cold, bucket)
        for product, mine in choices.items():
            for work, choice in mine.items():
                if work in tried:
                    continue
                tried.add(work)
                try:
                    graph = capture(self._run(bucket, product, choice), cold)
                except Exception:  # what this GPU or compiler refuses is no candidate
                    torch.cuda.synchronize()
                    continue
                found[work] = quick_us(graph, len(cold), min(found.values(), default=math.inf))
        return found

    def _in_class(
        self,
        bucket: int,
        product: Product,
        choices: dict[Work, LeafChoice],
        quick: dict[Work, float],
        refused: dict[str, list[str]],
    ) -> dict[Work, LeafChoice]:
        """The fastest few that give the bytes of every leaf apart."""
        found: dict[Work, LeafChoice] = {}
        for work in sorted((work for work in choices if work in quick), key=lambda w: quick[w]):
            if len(found) == _FINALISTS:
                break
            choice = choices[work]
            wrong = [
                kind for kind in trial_data.KINDS if self._differs(bucket, product, choice, kind)
            ]
            if wrong:
                refused.setdefault(title(choice), []).append(f"{bucket} ({', '.join(wrong)})")
            else:
                found[work] = choice
        if not found:
            raise RuntimeError(f"{product} at {bucket} rows: no choice keeps the bits")
        return found

    def _differs(self, bucket: int, product: Product, choice: LeafChoice, kind: str) -> bool:
        roots, wanted = self._roots[product], self._wanted[product, kind]
        flags = []
        for m in {bucket, fewest_rows(bucket)}:
            x = self._rows[kind][:m]
            sums = leaf_gemm.leaf_sums(x, self._weights[kind], roots, choice)
            flags.append(leaf_trials.differs(sums, wanted[:, :m]))
        return bool(torch.stack(flags).any())

    def _full(self, bucket: int, runs: list[Callable[[torch.Tensor], object]]) -> list[float]:
        """Microseconds of the peer, then of each run, in turn."""
        cold = enough(self._cold, bucket)
        x, residual = self._rows["random"][:bucket], self._residual[:bucket]
        peer: Callable[[torch.Tensor], object] = partial(
            _peer, x=x, residual=residual, weight=self._norm_weight
        )
        graphs = [capture(run, cold) for run in [peer, *runs]]
        return interleaved_us(graphs, len(cold), self._repeats)

    def _run(
        self, bucket: int, product: Product, choice: LeafChoice
    ) -> Callable[[torch.Tensor], object]:
        x, residual = self._rows["random"][:bucket], self._residual[:bucket]
        roots = self._roots[product]
        return lambda w: _sum_and_read(w, x, roots, choice, residual, self._norm_weight)


def bucket_choices(
    product: Product, roots: tuple[Expression, ...], bucket: int, sms: int
) -> dict[Work, LeafChoice]:
    """What is measured at a bucket, the static choice first; sms: 0 without descriptors."""
    n, k, leaves = product.n, product.k, product.leaves
    found = [leaf_choice(bucket, n, k, leaves, roots, float32=False, sms=sms)]
    found += [
        c
        for c in leaf_candidates(bucket, n, k, leaves, roots)
        if sms or not variant_of(c.tile).descriptors
    ]
    return {work_of(choice, leaves, roots): choice for choice in found}


def work_of(choice: LeafChoice, leaves: int, roots: tuple[Expression, ...]) -> Work:
    """Equal for choices that run the same kernel over the same subtrees."""
    parts = cut_roots(roots, choice.cut)
    form = None if parts is None else root_form(0, leaves, parts[0])
    return form, choice.kernel, format_tile(choice.tile)


def work_title(work: Work) -> str:
    """Work in words: roots, groups, parts and pair of its form, kernel, tile."""
    form, kernel, tile = work
    sizes = "" if form is None else f"{form.roots}.{form.groups}.{form.parts}.{form.pair} "
    return f"{sizes}{kernel} {tile}"


def title(choice: LeafChoice) -> str:
    """A choice in words."""
    return f"cut {choice.cut} {choice.kernel} {format_tile(choice.tile)}"


def _sum_and_read(
    w: torch.Tensor,
    x: torch.Tensor,
    roots: tuple[Expression, ...],
    choice: LeafChoice,
    residual: torch.Tensor,
    weight: torch.Tensor,
) -> object:
    values = leaf_gemm.leaf_sums(x, w, roots, choice).values
    sums = PartialSums(values, (fold_tree("sequential", values.shape[0]),))
    return norm.fold_and_norm(sums, None, residual, Norm(weight, _EPS))


def _peer(w: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> object:
    product = torch.nn.functional.linear(x, w.view(residual.shape[1], -1))
    return norm.add_residual_and_norm(product, None, residual, Norm(weight, _EPS))
