"""Top-k, top-p and min-p against exact references in Python integers and fractions."""

import math
from fractions import Fraction

import numpy
import pytest
import torch

from tests.kernels.cpu.sample_logits import (
    SHARES,
    VOCABULARIES,
    exact_top_p,
    ids_of,
    logits_smooth,
    logits_with_ties,
    total_order,
)
from tpdet.kernels.cpu.sampling.noise import fixed_point_mass
from tpdet.kernels.cpu.sampling.ranks import select_prefix, top_ids, unsigned_keys
from tpdet.kernels.cpu.sampling.tokens import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
)
from tpdet.kernels.exact.thresholds import top_p_numerator, top_p_threshold


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_top_k_keeps_exactly_k_and_the_lowest_ids_on_ties(vocabulary):
    for x in (
        logits_with_ties(vocabulary, 6),
        logits_smooth(vocabulary, 6),
        torch.zeros(vocabulary),
    ):
        order = total_order(x)
        for k in (1, 2, 20, 63, vocabulary // 2, vocabulary - 1, vocabulary):
            assert ids_of(keep_top_k(x, k)) == sorted(order[:k])


@pytest.mark.parametrize(
    "variant",
    [
        lambda x, k: torch.zeros_like(x, dtype=torch.bool).index_fill(
            0, torch.topk(x, k).indices, 1
        ),
        lambda x, k: x >= torch.topk(x, k).values[-1],
    ],
    ids=["unordered top-k", "all ties kept"],
)
def test_control_an_unordered_top_k_is_caught(variant):
    x = logits_with_ties(1_000, 6)
    order = total_order(x)
    assert any(ids_of(variant(x, k)) != sorted(order[:k]) for k in range(1, 200))


def test_the_likeliest_come_best_first_with_ties_by_lowest_id():
    for x in (logits_with_ties(5_000, 7), logits_smooth(5_000, 7), torch.zeros(50)):
        order = total_order(x)
        for count in (1, 2, 5, 20):
            assert top_ids(x, count).tolist() == order[:count]
    assert top_ids(torch.tensor([1.0, 2.0, 1.0]), 20).tolist() == [1, 0, 2]


def test_keys_order_floats_as_floats():
    edge = [0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 1.0, -1.0, 3.4e38, -3.4e38, -math.inf]
    x = torch.tensor([*edge, *logits_smooth(500, 8, 1e3).tolist()])
    keys = unsigned_keys(x).tolist()
    assert all(0 <= key < 1 << 32 for key in keys)
    for i, a in enumerate(x.tolist()):
        for j, b in enumerate(x.tolist()):
            assert (keys[i] < keys[j]) == (a < b)


@pytest.mark.parametrize("vocabulary", VOCABULARIES[:2])
@pytest.mark.parametrize("share", SHARES)
def test_top_p_keeps_the_shortest_prefix_that_holds_the_share(vocabulary, share):
    numerator = top_p_numerator(share)
    for x in (
        logits_with_ties(vocabulary, 9),
        logits_smooth(vocabulary, 9),
        torch.zeros(vocabulary),
    ):
        assert ids_of(keep_top_p(x, numerator)) == exact_top_p(x, numerator)


def test_control_a_float_cumulative_sum_is_caught():
    def naive(x: torch.Tensor, share: float) -> list[int]:
        values, ids = torch.sort(x, descending=True)
        before = torch.cumsum(torch.softmax(values, 0), 0) - torch.softmax(values, 0)
        return sorted(ids[before < share].tolist())

    cases = [(logits_with_ties(1_000, seed), share) for seed in range(4) for share in SHARES]
    assert any(naive(x, share) != exact_top_p(x, top_p_numerator(share)) for x, share in cases)


def test_the_top_p_threshold_is_exact_beyond_64_bits():
    for numerator in (1, 2, 3, 966_367_642, (1 << 30) - 1, 1 << 30):
        for total in (1 << 40, (1 << 40) + 1, (1 << 62) - 1, 1 << 62, 123_456_789_123_456_789):
            exact = math.ceil(Fraction(numerator * total, 1 << 30))
            assert top_p_threshold(numerator, total) == exact
            assert numerator * (total >> 30) < 1 << 63


def test_a_vocabulary_in_shards_selects_the_same_ids():
    x = logits_with_ties(3_001, 10)
    mass = fixed_point_mass(x, x.amax())
    threshold = top_p_threshold(top_p_numerator(0.9), int(mass.sum()))
    shards = [slice(0, 700), slice(700, 701), slice(701, 2_500), slice(2_500, 3_001)]
    keys, found, missing = unsigned_keys(x), 0, threshold
    for shift in (24, 16, 8, 0):
        histogram = [0] * 256
        for shard in shards:  # each shard adds its own integers, as ranks would
            for key, weight in zip(keys[shard].tolist(), mass[shard].tolist(), strict=True):
                if key >> (shift + 8) == found:
                    histogram[(key >> shift) & 255] += weight
        digit = 255
        while histogram[digit] < missing:
            missing -= histogram[digit]
            digit -= 1
        found = found << 8 | digit
    selected = ids_of(select_prefix(x, mass, threshold))
    kept = set(keys[selected].tolist())
    assert min(kept) == found
    ties = ids_of(keys == found)
    weight = int(mass[ties[0]])
    assert [i for i in selected if i in set(ties)] == ties[: -(-missing // weight)]


@pytest.mark.parametrize("min_p", [1e-30, 0.01, 0.3, 1.0])
def test_min_p_keeps_what_is_likely_enough(min_p):
    x = logits_with_ties(1_000, 11)
    bound = numpy.float32(x.max().item()) + numpy.float32(math.log(min_p))
    assert ids_of(keep_min_p(x, min_p)) == [i for i, v in enumerate(x.tolist()) if v >= bound]
