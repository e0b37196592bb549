"""What the sampling kernels share: the table of a step's rows, and the order of a row's ids.

    table   int64 [R, ROW_FIELDS]        what the host says of each row; `RowFields` in this order
    peaks   int64 [parts, R, PEAK_FIELDS]   the largest sort keys of each part of a row
    bounds  int64 [F, BOUND_FIELDS]      what the filters say of each of the F filtered rows

Floats stand in int64 fields as the bits of an fp32.

The sort key is the total order of a row's ids (value descending, id ascending) as one integer:

    bits      = int32 bits of x, both zeros as +0.0
    value key = bits ^ ((bits >> 31) & 0x7fffffff)        int32, monotone in x; -inf is the least
    sort key  = value key * 2^22 + (2^22 - 1 - id)        int64, another for each id of a row

So 1.0 (bits 0x3f800000) of id 5 has 0x3f800000 * 2^22 + 4194298, that of id 6 has one less, and
-1.0 (bits 0xbf800000, value key -0x3f800001) of any id has a negative one. The largest sort key is
the likeliest id, and of ties the lowest one: a maximum of integers settles both, in any layout.
Limits: fp32 without NaN, ids below 2^22.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl

from tpdet.kernels.exact.thresholds import FLOAT32_MAX, KEEP_ALL, min_p_distance, top_p_numerator
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.order import TOP_P_BITS

GREEDY, RANDOM, SCORED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of rows: the largest logit, the best score, or a token that the caller scores."""


class RowFields(NamedTuple):
    """One row of the table, in the order in which it is stored."""

    seed_low: int = 0
    seed_high: int = 0
    position: int = 0
    choice: int = 0
    temperature: int = 0  # fp32 bits
    kind: int = GREEDY.value
    top_k: int = 0
    top_p: int = 0  # the numerator P of 2^30
    min_p: int = 0  # fp32 bits of ln(min_p)
    copy: int = -1  # the row's number among the copies with penalties; -1: it has none
    slot: int = -1  # its number among filtered rows, -1: it has none; of a SCORED row the token
    unused: int = 0


def _offset(name: str) -> tl.constexpr:
    return tl.constexpr(RowFields._fields.index(name))


SEED_LOW, SEED_HIGH = _offset("seed_low"), _offset("seed_high")
POSITION, CHOICE = _offset("position"), _offset("choice")
TEMPERATURE, KIND = _offset("temperature"), _offset("kind")
TOP_K, TOP_P, MIN_P = _offset("top_k"), _offset("top_p"), _offset("min_p")
COPY, SLOT = _offset("copy"), _offset("slot")
SCORED_TOKEN = SLOT
ROW_FIELDS = tl.constexpr(len(RowFields._fields))

LOGITS_PEAK = tl.constexpr(0)  # of the logits as they are
SAMPLED_PEAK = tl.constexpr(1)  # of what is sampled from: the row's copy where it has one
PEAK_FIELDS = tl.constexpr(2)

BOUND = tl.constexpr(0)  # the smallest sort key that is kept
SAMPLE = tl.constexpr(1)  # the sort key of the best score
BOUND_FIELDS = tl.constexpr(2)

ID_BITS = 22
LARGEST_ID = (1 << ID_BITS) - 1
SIGN_AND = tl.constexpr(0x7FFFFFFF)
"""The bits that are flipped in a negative float, so that its integer grows with it."""
VALUE_SHIFT = tl.constexpr(ID_BITS)
KEYS_PER_VALUE = tl.constexpr(1 << ID_BITS)
LAST_ID = tl.constexpr(LARGEST_ID)
MOST_VALUE_KEY = tl.constexpr((1 << 31) - 1)
INFINITY_KEY = tl.constexpr(0x7F800000)  # the value key of +inf
MINUS_INFINITY_KEY = tl.constexpr(-0x7F800001)  # and of -inf
FLOAT32_MOST = tl.constexpr(FLOAT32_MAX)
ABOVE_ALL = tl.constexpr(1 << 62)
"""A sort key above that of every id."""
BELOW_ALL = tl.constexpr(-(1 << 62))
"""A sort key below that of every id: of what is not there."""
KEEPS_ALL = tl.constexpr(-(1 << 31 << ID_BITS))
"""The bound that cuts off no id: no value key is smaller than -2^31."""
TOP_P_OFF = tl.constexpr(KEEP_ALL)
"""The numerator P that keeps every id."""
_TOP_P_BITS = tl.constexpr(TOP_P_BITS)


@triton.jit
def load_float(field):
    """The fp32 whose bits stand in an int64 field."""
    return tl.load(field).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def float_bits(x):
    """The bits of an fp32 as an int64."""
    return x.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def flipped(ids):
    """LAST_ID - ids, and back: of equal values the lower id has the larger sort key."""
    return tl.full((), LAST_ID, tl.int64) - ids


@triton.jit
def value_key_of(key):
    """The value key in a sort key, int64."""
    return key >> VALUE_SHIFT


@triton.jit
def sort_key(x, ids):
    """int64 sort keys of fp32 values x of vocabulary ids."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    value_key = (bits ^ ((bits >> 31) & SIGN_AND)).to(tl.int64)
    return value_key * KEYS_PER_VALUE + flipped(ids.to(tl.int64))


@triton.jit
def least_key(value):
    """The sort key below those of all ids with an fp32 value, above those of smaller values."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & SIGN_AND)).to(tl.int64) * KEYS_PER_VALUE


@triton.jit
def value_of(key):
    """The fp32 value in a sort key, zeros as +0.0."""
    bits = (key >> VALUE_SHIFT).to(tl.int32)
    return (bits ^ ((bits >> 31) & SIGN_AND)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    """The id in a sort key, int32."""
    return flipped(key & LAST_ID).to(tl.int32)


@triton.jit
def token_of(key):
    """The id in a sort key; -1 where its value is -inf or there is none."""
    return tl.where((key >> VALUE_SHIFT) > MINUS_INFINITY_KEY, flipped(key & LAST_ID), -1)


@triton.jit
def threshold_of(numerator, total):
    """ceil(numerator * total / 2^30) in int64."""
    low = total & (TOP_P_OFF - 1)
    return numerator * (total >> _TOP_P_BITS) + ((numerator * low + (TOP_P_OFF - 1)) >> _TOP_P_BITS)


def row_table(
    rows: PlainRows, changed: list[int], vocabulary: int
) -> tuple[np.ndarray, np.ndarray, bool]:
    """The table of R > 0 rows, int64 row by row; the filtered ones, int64 [F]; is any random.

    changed: rows with a copy. Top-k or top-p may take an id from a filtered row: it has a slot.
    """
    table = np.empty((len(rows), len(RowFields._fields)), np.int64)
    table[:, SEED_LOW.value : SEED_HIGH.value + 1] = rows.seed_words
    table[:, POSITION.value], table[:, CHOICE.value] = rows.positions, rows.choices
    ways, which = rows.ways()
    filters = [_filters(*way, vocabulary) for way in ways]
    table[:, TEMPERATURE.value : MIN_P.value + 1] = np.array([way[1:] for way in filters])[which]
    table[:, COPY.value :] = -1, -1, 0
    if changed:
        table[changed, COPY.value] = range(len(changed))
    filtered = np.empty(0, np.int64)
    if any(way[0] for way in filters):
        filtered = np.flatnonzero(np.array([way[0] for way in filters])[which])
        table[filtered, SLOT.value] = np.arange(len(filtered))
    return table.reshape(-1), filtered, any(way.temperature != 0.0 for way in ways)


def table_of_tokens(tokens: Sequence[int]) -> list[int]:
    """The table of rows whose tokens are chosen already and only scored."""
    return [n for token in tokens for n in RowFields(kind=SCORED.value, slot=token)]


@lru_cache(maxsize=4096)
def _filters(
    temperature: float, top_k: int, top_p: float, min_p: float, vocabulary: int
) -> tuple[bool, int, int, int, int, int]:
    """Whether a row is filtered, and its fields from `temperature` to `min_p`."""
    random = temperature != 0.0
    most = min(top_k, vocabulary) if random and top_k > 0 else vocabulary
    numerator = top_p_numerator(top_p) if random else KEEP_ALL
    distance = min_p_distance(min_p) if random and min_p > 0.0 else -float("inf")
    kind = RANDOM.value if random else GREEDY.value
    filtered = most < vocabulary or numerator < KEEP_ALL
    return filtered, _bits(temperature or 1.0), kind, most, numerator, _bits(distance)


def _bits(value: float) -> int:
    """int32 bits of a number rounded to fp32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
