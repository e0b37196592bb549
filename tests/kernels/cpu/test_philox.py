"""Philox4x32-10: published answers, the tensor form against plain integers, no layout in it."""

import random

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tpdet.kernels.exact.philox import philox4x32, philox_words

ALL = 0xFFFFFFFF
# Random123, tests/kat_vectors, "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_the_published_answers_come_out(counter, key, output):
    assert philox4x32(counter, key) == output
    word = philox_words(
        torch.tensor(counter[:1]),
        seed=key[0] | key[1] << 32,
        position=counter[1],
        choice=counter[2],
        purpose=counter[3],
    )
    assert word.tolist() == [output[0]]


def test_the_tensor_form_equals_plain_integers():
    generator = random.Random(7)
    for _ in range(20):
        ids = [generator.choice([0, 1, ALL, generator.getrandbits(32)]) for _ in range(50)]
        seed, position = generator.getrandbits(64), generator.getrandbits(32)
        choice, purpose = generator.getrandbits(7), generator.getrandbits(32)
        words = philox_words(
            torch.tensor(ids), seed=seed, position=position, choice=choice, purpose=purpose
        )
        key = seed & ALL, seed >> 32
        assert words.tolist() == [philox4x32((i, position, choice, purpose), key)[0] for i in ids]


def test_a_word_depends_on_its_id_and_not_on_the_ids_beside_it():
    whole = philox_words(torch.arange(151_936), seed=3, position=9, choice=1)
    for start, stop in [(0, 1), (5, 6), (1000, 1037), (100_000, 151_936)]:
        part = philox_words(torch.arange(start, stop), seed=3, position=9, choice=1)
        assert_same_bits(part, whole[start:stop])


def test_the_ids_given_are_not_changed():
    ids = torch.arange(100)
    philox_words(ids, seed=3, position=9, choice=1)
    assert_same_bits(ids, torch.arange(100))


def test_every_field_of_key_and_counter_changes_the_words():
    fields = {"seed": 5, "position": 6, "choice": 7, "purpose": 0}
    ids = torch.arange(64)
    base = philox_words(ids, **fields)
    for changed in ({"seed": 6}, {"seed": 5 | 1 << 40}, {"position": 7}, {"choice": 8}):
        assert not torch.equal(philox_words(ids, **{**fields, **changed}), base)
    assert not torch.equal(philox_words(ids, **{**fields, "purpose": 1}), base)


def test_words_are_spread_evenly():
    words = philox_words(torch.arange(1 << 16), seed=11, position=0, choice=0)
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((words >> shift) & 255, minlength=256)
        chi_squared = float(((counts - 256.0) ** 2 / 256.0).sum())
        assert 150 < chi_squared < 390  # 255 degrees of freedom, far beyond 1 in 10^5


@pytest.mark.parametrize(
    "wrong", [{"seed": -1}, {"seed": 1 << 64}, {"position": -1}, {"choice": 1 << 32}]
)
def test_words_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        philox_words(torch.arange(2), **{"seed": 1, "position": 2, "choice": 3, **wrong})
