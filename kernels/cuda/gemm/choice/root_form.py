"""The one form of every root that a rank sends, and which kernels fold it: no kernel stands here.

    y[r] = ((g_0 + g_1) + g_2) + ...         a root is a chain of groups
    g    = p_0  or  p_0 + p_1                a group is one part or two
    p    = l_i  or  l_i + l_(i+1)            a part is one leaf or two

In the orders `sequential`, `pairs` and `tree` (up to 8 leaves) all roots of a rank have one form,
and so has every cut below them.
"""

from dataclasses import dataclass
from functools import cache

from tpdet.kernels.cuda.gemm.choice.variants import Variant
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.order import Expression

TRADES_DEPTH = 64  # of a step: a row of the ring is then one swizzled line of 128 bytes
MIN_FOLD_STEPS = 2  # steps of K in a leaf that is folded inside a program
FOLDS = ("flat", "nested")
"""Kernels of `gemm_fold`: one loop over all leaves' steps, or a loop a leaf."""

_BARRIERS = 1024
_PARTS = ((1, 1), (2, 1), (2, 2))  # (pair, parts) of the orders


@dataclass(frozen=True)
class RootForm:
    """`roots` equal chains of `groups` groups of `parts` parts of `pair` leaves."""

    roots: int
    groups: int
    parts: int
    pair: int

    @property
    def leaves(self) -> int:
        """Leaves of one root."""
        return self.groups * self.parts * self.pair


@cache
def root_form(first_leaf: int, leaves: int, roots: tuple[Expression, ...]) -> RootForm | None:
    """The form whose roots are exactly these, over `leaves` leaves; None if there is none."""
    if not roots or leaves % len(roots):
        return None
    share = leaves // len(roots)
    for pair, parts in _PARTS:
        if share % (pair * parts) == 0:
            form = RootForm(len(roots), share // (pair * parts), parts, pair)
            if roots == tuple(_expression(form, first_leaf + r * share) for r in range(form.roots)):
                return form
    return None


def _expression(form: RootForm, first: int) -> Expression:
    def chain(terms: list[Expression]) -> Expression:
        total = terms[0]
        for term in terms[1:]:
            total = (total, term)
        return total

    def part(at: int) -> Expression:
        return at if form.pair == 1 else (at, at + 1)

    width = form.parts * form.pair
    groups = [first + group * width for group in range(form.groups)]
    return chain([chain([part(at + p * form.pair) for p in range(form.parts)]) for at in groups])


def fold_fits(form: RootForm, k: int, variant: Variant, kernel: str) -> bool:
    """Whether `kernel`, of FOLDS or "gluon", can fold leaves of width k by this tile."""
    if form.leaves == 1 or k % variant.depth or k // variant.depth < MIN_FOLD_STEPS:
        return False
    if kernel == "gluon":
        rests = form.parts == 2 and form.groups > 1  # a half rests in the place of its tile
        room = places_bytes(variant, 4) if rests else ring_bytes(variant)
        return variant.columns == 128 and trades_fit(k, variant) and room <= H200.shared_bytes
    return kernel == "flat" or (kernel == "nested" and not variant.swap)


def trades_fit(k: int, variant: Variant) -> bool:
    """Whether warps of several trades take this tile, for leaves of width k."""
    steps_fit = variant.depth == TRADES_DEPTH and k % variant.depth == 0
    return variant.rows == 128 and variant.columns in (128, 256) and not variant.swap and steps_fit


def ring_bytes(variant: Variant) -> int:
    """Shared memory that warps of several trades take for their stages and barriers."""
    return variant.stage_bytes + _BARRIERS


def places_bytes(variant: Variant, size: int) -> int:
    """The same with places for a finished tile of values of `size` bytes."""
    return ring_bytes(variant) + variant.rows * variant.columns * size
