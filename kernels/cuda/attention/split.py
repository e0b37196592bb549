"""One tile and one merge of paged attention: the only arithmetic that its kernels do on scores.

A state is (largest score m [R], mass l [R, 16], weighted values o [R, D]); a split of 256 keys is
four tiles of 64 from a fresh state, in ascending order (Rule 7 of the contract; online softmax by
Milakov and Gimelshein 2018, arXiv 1805.02867):

    s = q . k,  c = fp32(log2 e / sqrt(D)),  m = -1e30 at first
    with a soft-cap:  s = capped((q . k) / sqrt(D)),  c = fp32(log2 e)
    m' = max(m, max(s) * c);  a = exp2(m - m');  p = round(exp2(fma(s, c, -m')))  (unseen: 0)
    l' = l * a + p . 1;  o' = o * a + p . v

and two states merge with the same factors. All sums are chains of the matrix unit (16 products at
a time, ascending; fp32 operands: one at a time), the mass too, so neither the rows of a program nor
its warps reach a bit. A tile that shows a row no key leaves its state, up to the sign of a zero,
which the `+ 0.0` of the result takes away: such tiles may be skipped or not.

A head's sink, in models that have them, is a row's state before its first split: m = sink * log2 e,
l = 1, o = 0.
"""

import math
import struct

import triton
import triton.language as tl

from tpdet.kernels.cuda.pointwise.soft_cap import SoftCap, capped, soft_cap_of
from tpdet.kernels.order import MASKED, PAGE_TOKENS, TILE_TOKENS

PAGE = tl.constexpr(PAGE_TOKENS)
TILE = tl.constexpr(TILE_TOKENS)
TILES = tl.constexpr(PAGE_TOKENS // TILE_TOKENS)
UNSEEN = tl.constexpr(MASKED)
LOG2_E = tl.constexpr(math.log2(math.e))
BEYOND = tl.constexpr(-1e38)  # an unseen key's score: scaled, it is still below UNSEEN
MASS_LANES = tl.constexpr(16)  # the narrowest product every matrix instruction has


def score_scale(head: int, cap: float = 0.0) -> float:
    """fp32(log2 e / sqrt(D)), rounded once from fp64; of capped scores fp32(log2 e)."""
    size = 1.0 if cap else math.sqrt(head)
    scale: float = struct.unpack("f", struct.pack("f", math.log2(math.e) / size))[0]
    return scale


def score_cap(head: int, cap: float) -> SoftCap | None:
    """The cap of q . k; None for none."""
    return soft_cap_of(cap, 1.0 / math.sqrt(head))


@triton.jit
def fresh_state(ROWS: tl.constexpr, LANES: tl.constexpr):
    """The state before any key."""
    largest = tl.full((ROWS,), UNSEEN, tl.float32)
    mass = tl.zeros((ROWS, MASS_LANES), tl.float32)
    total = tl.zeros((ROWS, LANES), tl.float32)
    return largest, mass, total


@triton.jit
def row_state(sinks, head, ROWS: tl.constexpr, LANES: tl.constexpr, SINKS: tl.constexpr):
    """Largest score, mass [R] and total [R, D] of rows of query heads [R] before their first split.

    sinks: fp32 by query head, read if SINKS.
    """
    if SINKS:
        largest = tl.load(sinks + head) * LOG2_E
        mass = tl.full((ROWS,), 1.0, tl.float32)
    else:
        largest = tl.full((ROWS,), UNSEEN, tl.float32)
        mass = tl.zeros((ROWS,), tl.float32)
    return largest, mass, tl.zeros((ROWS, LANES), tl.float32)


@triton.jit
def add_tile(
    q, k, v, seen, largest, mass, total, scale, MASK: tl.constexpr, CAP: tl.constexpr = None
):
    """One tile: q [R, D], k [D, 64], v [64, D], seen [R, 64] (read if MASK) onto a state."""
    score = tl.dot(q, k, input_precision="ieee")
    if CAP is not None:
        score = capped(score, CAP)
    if MASK:
        score = tl.where(seen, score, BEYOND)
    raised = tl.maximum(largest, tl.max(score, 1) * scale)
    shrink = tl.exp2(largest - raised)
    weight = tl.exp2(tl.fma(score, scale, -raised[:, None]))
    if MASK:
        weight = tl.where(seen, weight, 0.0)
    weight = weight.to(v.dtype)
    ones = tl.full((TILE, MASS_LANES), 1.0, v.dtype)
    total = tl.dot(weight, v, total * shrink[:, None], input_precision="ieee")
    mass = tl.dot(weight, ones, mass * shrink[:, None], input_precision="ieee")
    return raised, mass, total


@triton.jit
def add_tile_swapped(q, k, v, seen, largest, mass, total, scale, CAP: tl.constexpr = None):
    """`add_tile`, every product the other way round: q [D, R], k [64, D], v [D, 64], seen [64, R].

    The state's sums are [16, R] and [D, R]. Keys and lanes fill the side of 64 that Hopper's wide
    matrix instructions have and few rows do not; a product's chain over k is the same.
    """
    score = tl.dot(k, q, input_precision="ieee")
    if CAP is not None:
        score = capped(score, CAP)
    score = tl.where(seen, score, BEYOND)
    raised = tl.maximum(largest, tl.max(score, 0) * scale)
    shrink = tl.exp2(largest - raised)
    weight = tl.exp2(tl.fma(score, scale, -raised[None, :]))
    weight = tl.where(seen, weight, 0.0).to(v.dtype)
    ones = tl.full((MASS_LANES, TILE), 1.0, v.dtype)
    total = tl.dot(v, weight, total * shrink[None, :], input_precision="ieee")
    mass = tl.dot(ones, weight, mass * shrink[None, :], input_precision="ieee")
    return raised, mass, total


@triton.jit
def row_mass(mass):
    """Mass [R, 16], whose columns are equal, as [R]."""
    return tl.max(mass, 1)


@triton.jit
def merge_factors(largest, other):
    """What a later state with largest score `other` does to one with `largest`: m', a, b."""
    raised = tl.maximum(largest, other)
    return raised, tl.exp2(largest - raised), tl.exp2(other - raised)


@triton.jit
def merge(largest, mass, total, visible, other_largest, other_mass, other_total):
    """The later state (`other_*`: [R], [R], [R, D]) onto the earlier; only where `visible` [R]."""
    raised, a, b = merge_factors(largest, other_largest)
    merged_mass = mass * a + other_mass * b
    merged_total = total * a[:, None] + other_total * b[:, None]
    largest = tl.where(visible, raised, largest)
    mass = tl.where(visible, merged_mass, mass)
    total = tl.where(visible[:, None], merged_total, total)
    return largest, mass, total


@triton.jit
def row_result(mass, total, LIVE):
    """round-ready [R, D]: total * (1 / mass) + 0.0; rows that are not LIVE [R] divide by one."""
    reciprocal = tl.div_rn(1.0, tl.where(LIVE, mass, 1.0))
    return total * reciprocal[:, None] + 0.0


@triton.jit
def sees(key, position, window, WINDOW: tl.constexpr):
    """Whether a row at `position` sees `key`: key <= position, within the window if WINDOW."""
    seen = key <= position
    if WINDOW:
        seen = seen & (key > position - window)
    return seen


@triton.jit
def sees_split(split, position, window, WINDOW: tl.constexpr):
    """Whether a row at `position` sees any key of a split."""
    visible = split * PAGE <= position
    if WINDOW:
        visible = visible & (split * PAGE + (PAGE - 1) > position - window)
    return visible
