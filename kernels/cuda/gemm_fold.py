"""Leaves folded inside the program that made them: many rows on Hopper, no workspace.

    y[r] = ((g_0 + g_1) + g_2) + ...         a root is a chain of groups
    g    = p_0  or  p_0 + p_1                a group is one part or two
    p    = l_i  or  l_i + l_(i+1)            a part is one leaf or two

Every root that a rank sends in the orders `sequential`, `pairs` and `tree` (up to 8 leaves) has
this form, and all its roots have the same (`root_form`). Each leaf is its own fp32 chain from +0;
sums start from -0.0, the identity of addition, so the first term keeps its bits. The loops stay
rolled: unrolled, ptxas serialises the matrix instructions (warning C7515). A leaf takes at least
two steps of K, and the number of steps is not specialised: a loop of one step vanishes, and the
compiler then adds into the matrix instruction's accumulator, in another order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.gemm_descriptor import describe_operands, store_tile
from tpdet.kernels.cuda.gemm_pointer import tile_origin
from tpdet.kernels.cuda.gemm_variants import MIN_FOLD_STEPS, Variant
from tpdet.kernels.order import Expression

_PARTS = ((1, 1), (2, 1), (2, 2))  # (pair, parts) of the orders


@dataclass(frozen=True)
class RootForm:
    """`roots` equal chains of `groups` groups of `parts` parts of `pair` leaves."""

    roots: int
    groups: int
    parts: int
    pair: int

    @property
    def leaves_alone(self) -> bool:
        """Every root is one leaf: nothing to fold."""
        return self.groups * self.parts * self.pair == 1


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


@triton.jit
def minus_zeros(BM: tl.constexpr, BN: tl.constexpr):
    """-0.0 everywhere: x + -0.0 is x for every x, -0.0 too."""
    return tl.full((BM, BN), -2147483648, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def leaf_chain(x, w, row, column, leaf, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The sum of one leaf for one tile."""
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        total = tl.dot(x.load([row, leaf * k + at]), w.load([leaf * n + column, at]).T, total)
    return total


@triton.jit(do_not_specialize=["m"])
def descriptor_fold(
    x, w, y, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr,
    ROOTS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Tiles [BM, BN] of all roots, a program taking every num_programs-th."""
    blocks = tl.cdiv(m, BM) * tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), blocks * ROOTS, tl.num_programs(0)):
        root = tile // blocks
        row, column = tile_origin(tile % blocks, m, n, BM, BN)
        first = root * (GROUPS * PARTS * PAIR)
        total = minus_zeros(BM, BN)
        for group in range(GROUPS):
            if PARTS == 1:
                at = first + group * PAIR
                if PAIR == 1:
                    total += leaf_chain(x, w, row, column, at, n, k, BM, BN, BK)
                else:
                    left = leaf_chain(x, w, row, column, at, n, k, BM, BN, BK)
                    total += left + leaf_chain(x, w, row, column, at + 1, n, k, BM, BN, BK)
            else:
                term = minus_zeros(BM, BN)
                for part in range(PARTS):
                    at = first + (group * PARTS + part) * PAIR
                    left = leaf_chain(x, w, row, column, at, n, k, BM, BN, BK)
                    term += left + leaf_chain(x, w, row, column, at + 1, n, k, BM, BN, BK)
                total += term
        store_tile(y, root, row, column, total, HALVES)


@triton.jit(do_not_specialize=["m", "steps"])
def descriptor_fold_chain(
    x, w, y, m, n, steps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr,
    LEAVES: tl.constexpr,
):  # fmt: skip
    """One root, a chain of leaves of `steps` = k / BK steps, in one flat loop: `sequential`."""
    blocks = tl.cdiv(m, BM) * tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        row, column = tile_origin(tile, m, n, BM, BN)
        total = minus_zeros(BM, BN)
        leaf_sum = tl.zeros((BM, BN), tl.float32)
        for i in range(LEAVES * steps):
            leaf = i // steps
            step = i - leaf * steps
            a = x.load([row, i * BK])
            b = w.load([leaf * n + column, step * BK])
            leaf_sum = tl.dot(a, b.T, leaf_sum)
            if step == steps - 1:
                total += leaf_sum
                leaf_sum = tl.zeros((BM, BN), tl.float32)
        store_tile(y, 0, row, column, total, HALVES)


def run_fold(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, form: RootForm, variant: Variant, sms: int
) -> None:
    """x [M, L * K], w [L, N, K] contiguous -> y [at least form.roots, M, N] fp32, roots filled."""
    leaves, n, k = w.shape
    if k // variant.depth < MIN_FOLD_STEPS:
        raise ValueError(f"leaves of {k} are one step of {variant.depth}: fold them apart")
    m = x.shape[0]
    blocks = form.roots * triton.cdiv(m, variant.rows) * triton.cdiv(n, variant.columns)
    grid = (min(sms * variant.ctas, blocks),)
    x_at, w_at, y_at = describe_operands(x, w, y, variant)
    tile = {"BM": variant.rows, "BN": variant.columns, "BK": variant.depth}
    options = {
        "num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": False,
    }  # fmt: skip
    if form.roots == 1 and form.groups == leaves > 1:
        descriptor_fold_chain[grid](
            x_at, w_at, y_at, m, n, k // variant.depth,
            HALVES=variant.halves, LEAVES=leaves, **tile, **options,
        )  # fmt: skip
        return
    descriptor_fold[grid](
        x_at, w_at, y_at, m, n, k,
        HALVES=variant.halves, ROOTS=form.roots, GROUPS=form.groups, PARTS=form.parts,
        PAIR=form.pair, **tile, **options,
    )  # fmt: skip
