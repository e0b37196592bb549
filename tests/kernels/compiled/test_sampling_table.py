"""The table that the GPU's sampler reads: what it says of each row."""

import math
import random
import struct

import pytest

pytest.importorskip("triton")

import numpy as np
import torch

from tpdet.kernels.cuda.sampling import launch
from tpdet.kernels.cuda.sampling import table as layout
from tpdet.kernels.inputs.plain_rows import PlainRows, pack_row
from tpdet.kernels.inputs.row_params import RowParams

VOCABULARY = 1000


def table(params):
    numbers, filtered, random = layout.row_table(PlainRows.of(params), [1], VOCABULARY)
    assert random == any(how.temperature > 0 for how in params)
    return numbers.tolist(), filtered.tolist()


def bits(value):
    return struct.unpack("<i", struct.pack("<f", value))[0]


def test_a_row_says_its_seed_place_and_parameters():
    how = RowParams(0.7, (5 << 32) + 9, 31, choice=2, top_k=40, top_p=0.5, min_p=0.5)
    numbers, filtered = table([RowParams(1.0, 1, 2), RowParams(0.0, 3, 4, top_k=5), how])
    inf = bits(-float("inf"))
    assert filtered == [2], "a greedy row is not filtered"
    assert numbers[:12] == [1, 0, 2, 0, bits(1.0), 1, VOCABULARY, 1 << 30, inf, -1, -1, 0]
    assert numbers[12:24] == [3, 0, 4, 0, bits(1.0), 0, VOCABULARY, 1 << 30, inf, 0, -1, 0]
    distance = bits(math.log(0.5))
    assert numbers[24:] == [9, 5, 31, 2, bits(0.7), 1, 40, 1 << 29, distance, -1, 0, 0]


def test_top_k_of_the_whole_vocabulary_filters_nothing():
    params = [RowParams(1.0, 0, 0, top_k=VOCABULARY - i) for i in range(2)]
    assert table(params)[1] == [1]


def test_a_step_of_greedy_rows_has_the_table_of_its_rows():
    how = RowParams(temperature=0.0, seed=0, position=0)
    assert launch._all_greedy([how] * 5)
    kept = launch._greedy_table(5, VOCABULARY, torch.device("cpu"))
    asked = layout.row_table(PlainRows.of([how] * 5), [], VOCABULARY)
    assert kept.tolist() == asked[0].tolist() and not asked[1].size and not asked[2]
    numbers = [bits(1.0), 0, VOCABULARY, 1 << 30, bits(-float("inf"))]
    assert kept.tolist() == [0, 0, 0, 0, *numbers, -1, -1, 0] * 5


def test_rows_that_are_not_all_greedy_have_a_table_of_their_own():
    how = RowParams(temperature=0.0, seed=0, position=0)
    others = (
        RowParams(1.0, 0, 0), RowParams(0.0, 0, 0, bias={3: 1.0}),
        RowParams(0.0, 0, 0, forbidden=(2,)),
        RowParams(0.0, 0, 0, repetition_penalty=1.5), RowParams(0.0, 0, 0, allowed=b"\xff" * 125),
    )  # fmt: skip
    place = random.Random(1)
    for other in others:
        params = [how] * 6
        params[place.randrange(6)] = other
        assert not launch._all_greedy(params)
        assert not launch._all_greedy([other] * 6)


def test_a_row_whose_token_is_given_is_only_scored():
    given = [0, 0, 0, 0, 0, 2, 0, 0, 0, -1]
    assert layout.table_of_tokens([7, 0]) == [*given, 7, 0, *given, 0, 0]


def test_the_fields_that_kernels_read_are_the_tables():
    names = {name: at for at, name in enumerate(layout.RowFields._fields)}
    offsets = ("SEED_LOW", "SEED_HIGH", "POSITION", "CHOICE", "TEMPERATURE", "KIND", "TOP_K",
               "TOP_P", "MIN_P", "COPY", "SLOT")  # fmt: skip
    assert [getattr(layout, name).value for name in offsets] == list(range(11))
    assert all(names[name.lower()] == getattr(layout, name).value for name in offsets)
    assert layout.ROW_FIELDS.value == len(names) == 12


def test_plain_rows_have_the_table_and_the_params_of_their_rows():
    """In one way of sampling and in several, as a whole and cut; seeds of 64 bits."""
    draw = random.Random(2)
    ways = [(0.0, -1, 1.0, 0.0), (0.7, 40, 0.5, 0.5), (1.0, -1, 1.0, 0.0), (1.3, 0, 0.999, 0.0)]
    for some in (ways, ways[:1], ways[1:2]):
        rows = [(draw.getrandbits(64), draw.randrange(5), draw.choice(some)) for _ in range(40)]
        positions = [draw.randrange(2**31) for _ in rows]
        params = [
            RowParams(t, seed, position, choice, k, p, m)
            for (seed, choice, (t, k, p, m)), position in zip(rows, positions, strict=True)
        ]
        plain = PlainRows(b"".join(pack_row(s, c, *way) for s, c, way in rows), positions)
        assert [*plain] == [*PlainRows.of(params)] == params
        assert [*plain[7:20]] == params[7:20] and len(plain[7:20]) == 13
        for mine, cut in ((params, plain), (params[5:9], plain[5:9])):
            numbers, slots, _ = layout.row_table(cut, [], VOCABULARY)
            alone = [layout.row_table(PlainRows.of([how]), [], VOCABULARY) for how in mine]
            filtered = [row for row, (_, slot, _) in enumerate(alone) if slot.size]
            assert slots.tolist() == filtered
            expected = np.stack([fields for fields, _, _ in alone])
            expected[filtered, layout.SLOT.value] = range(len(filtered))
            assert numbers.tolist() == expected.reshape(-1).tolist()
    with pytest.raises(ValueError, match="2 rows have 1 positions"):
        PlainRows(pack_row(1, 0, 1.0, -1, 1.0, 0.0) * 2, [5])
