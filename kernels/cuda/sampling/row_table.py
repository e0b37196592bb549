"""The layout of the tables that the sampling kernels share, by name: the fields of a row, in order.

    table   int64 [R, ROW_FIELDS]        what the host says of each row; `RowFields` in this order
    peaks   int64 [parts, R, PEAK_FIELDS]   the largest sort keys of each part of a row
    bounds  int64 [F, BOUND_FIELDS]      what the filters found of each of the F filtered rows

Floats stand in int64 fields as the bits of an fp32.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl

from tpdet.kernels.exact.thresholds import KEEP_ALL, min_p_distance, top_p_numerator
from tpdet.kernels.inputs.plain_rows import PlainRows

GREEDY, RANDOM, GIVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
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
    copy: int = -1  # the row's place among the copies with penalties; -1: it has none
    slot: int = -1  # its place among filtered rows, -1: it has none; of a GIVEN row the token
    unused: int = 0


def _offset(name: str) -> tl.constexpr:
    return tl.constexpr(RowFields._fields.index(name))


SEED_LOW, SEED_HIGH = _offset("seed_low"), _offset("seed_high")
POSITION, CHOICE = _offset("position"), _offset("choice")
TEMPERATURE, KIND = _offset("temperature"), _offset("kind")
TOP_K, TOP_P, MIN_P = _offset("top_k"), _offset("top_p"), _offset("min_p")
COPY, SLOT = _offset("copy"), _offset("slot")
GIVEN_TOKEN = SLOT
ROW_FIELDS = tl.constexpr(len(RowFields._fields))

LOGITS_PEAK = tl.constexpr(0)  # of the logits as they are
SAMPLED_PEAK = tl.constexpr(1)  # of what is sampled from: the row's copy where it has one
PEAK_FIELDS = tl.constexpr(2)

BOUND = tl.constexpr(0)  # the smallest sort key that is kept
SAMPLE = tl.constexpr(1)  # the sort key of the best score
BOUND_FIELDS = tl.constexpr(2)


@triton.jit
def load_float(field):
    """The fp32 whose bits stand in an int64 field."""
    return tl.load(field).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def float_bits(x):
    """The bits of an fp32 as an int64."""
    return x.to(tl.int32, bitcast=True).to(tl.int64)


class _Filters(NamedTuple):
    """What a row's sampling parameters come to, before its seed and its places are known."""

    numbers: tuple[int, int, int, int, int]
    """The fields from `temperature` to `min_p`, in the order of `RowFields`."""
    filtered: bool


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
    found = [_filters(*way, vocabulary) for way in ways]
    numbers = np.array([each.numbers for each in found])
    table[:, TEMPERATURE.value : MIN_P.value + 1] = numbers[which]
    table[:, COPY.value :] = -1, -1, 0
    if changed:
        table[changed, COPY.value] = range(len(changed))
    filtered = np.empty(0, np.int64)
    if any(each.filtered for each in found):
        filtered = np.flatnonzero(np.array([each.filtered for each in found])[which])
        table[filtered, SLOT.value] = np.arange(len(filtered))
    return table.reshape(-1), filtered, any(way.temperature != 0.0 for way in ways)


def given_table(tokens: Sequence[int]) -> list[int]:
    """The table of rows whose tokens are given and only scored."""
    return [n for token in tokens for n in RowFields(kind=GIVEN.value, slot=token)]


@lru_cache(maxsize=4096)
def _filters(
    temperature: float, top_k: int, top_p: float, min_p: float, vocabulary: int
) -> _Filters:
    random = temperature != 0.0
    most = min(top_k, vocabulary) if random and top_k > 0 else vocabulary
    numerator = top_p_numerator(top_p) if random else KEEP_ALL
    distance = min_p_distance(min_p) if random and min_p > 0.0 else -float("inf")
    kind = RANDOM.value if random else GREEDY.value
    numbers = _bits(temperature or 1.0), kind, most, numerator, _bits(distance)
    return _Filters(numbers, most < vocabulary or numerator < KEEP_ALL)


def _bits(value: float) -> int:
    """int32 bits of a number rounded to fp32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
