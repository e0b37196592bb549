"""The table that the GPU's drawing reads: what it says of each row."""

import math
import random
import struct

import pytest

pytest.importorskip("triton")

import torch

from tpdet.kernels.cuda.sampling import sample_rows as row_draws
from tpdet.kernels.inputs.sampling import Draw

VOCABULARY = 1000


def table(draws):
    filtered = [row for row, how in enumerate(draws) if row_draws._way_of(how, VOCABULARY).filters]
    return row_draws._row_table(draws, [1], filtered, VOCABULARY), filtered


def bits(value):
    return struct.unpack("<i", struct.pack("<f", value))[0]


def test_a_row_says_its_seed_place_and_parameters():
    how = Draw(0.7, (5 << 32) + 9, 31, choice=2, top_k=40, top_p=0.5, min_p=0.5)
    numbers, filtered = table([Draw(1.0, 1, 2), Draw(0.0, 3, 4, top_k=5), how])
    inf = bits(-float("inf"))
    assert filtered == [2], "a greedy row is not filtered"
    assert numbers[:12] == [1, 0, 2, 0, bits(1.0), 1, VOCABULARY, 1 << 30, inf, -1, -1, 0]
    assert numbers[12:24] == [3, 0, 4, 0, bits(1.0), 0, VOCABULARY, 1 << 30, inf, 0, -1, 0]
    distance = bits(math.log(0.5))
    assert numbers[24:] == [9, 5, 31, 2, bits(0.7), 1, 40, 1 << 29, distance, -1, 0, 0]


def test_top_k_of_the_whole_vocabulary_filters_nothing():
    ways = (Draw(1.0, 0, 0, top_k=VOCABULARY), Draw(1.0, 0, 0, top_k=VOCABULARY - 1))
    assert table(ways)[1] == [1]


def test_a_step_of_likeliest_rows_has_the_table_of_its_rows():
    how = Draw(temperature=0.0, seed=0, position=0)
    assert row_draws._all_likeliest([how] * 5)
    kept = row_draws._likeliest_table(5, VOCABULARY, torch.device("cpu"))
    assert kept.tolist() == row_draws._row_table([how] * 5, [], [], VOCABULARY)
    numbers = [bits(1.0), 0, VOCABULARY, 1 << 30, bits(-float("inf"))]
    assert kept.tolist() == [0, 0, 0, 0, *numbers, -1, -1, 0] * 5


def test_rows_that_are_not_all_the_likeliest_have_a_table_of_their_own():
    how = Draw(temperature=0.0, seed=0, position=0)
    others = (
        Draw(1.0, 0, 0), Draw(0.0, 0, 0, bias={3: 1.0}), Draw(0.0, 0, 0, forbidden=(2,)),
        Draw(0.0, 0, 0, repetition_penalty=1.5), Draw(0.0, 0, 0, allowed=b"\xff" * 125),
    )  # fmt: skip
    place = random.Random(1)
    for other in others:
        draws = [how] * 6
        draws[place.randrange(6)] = other
        assert not row_draws._all_likeliest(draws)
        assert not row_draws._all_likeliest([other] * 6)
