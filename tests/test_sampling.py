"""Sampling kernels against slow exact references in Python integers and fractions."""

import itertools
import math
from fractions import Fraction

import numpy
import pytest
import torch

from tests.bits import assert_same_bits, same_bits
from tpdet.kernels.cpu import gumbel
from tpdet.kernels.cpu.filters import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    scale_by_temperature,
    top_p_numerator,
    top_p_threshold,
)
from tpdet.kernels.cpu.log_softmax import fixed_point_mass, log_mass, log_probabilities
from tpdet.kernels.cpu.order_select import select_prefix, top_ids, unsigned_keys
from tpdet.kernels.cpu.sampling import NO_TOKEN, choose_token
from tpdet.kernels.draw import Draw

VOCABULARIES = (1_000, 32_003, 151_936)
SHARES = (1e-12, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-7)


def logits_with_ties(vocabulary: int, seed: int, levels: int = 40) -> torch.Tensor:
    """Few distinct values, so that every cut falls among equal ones; both zeros and -inf occur."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-levels, 12, (vocabulary,), generator=generator) / 4.0
    x[::7] = -0.0
    x[3::501] = -torch.inf
    return x


def logits_smooth(vocabulary: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def total_order(x: torch.Tensor) -> list[int]:
    values = x.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def exact_top_p(x: torch.Tensor, numerator: int) -> list[int]:
    mass = fixed_point_mass(x, x.amax()).tolist()
    goal, reached, kept = Fraction(numerator * sum(mass), 2**30), 0, []
    for index in total_order(x):
        kept.append(index)
        reached += mass[index]
        if reached >= goal:
            break
    return sorted(kept)


def ids_of(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().view(-1).tolist()


# --- one bit class: an element's place, its array's length and the threads do not matter ---


@pytest.mark.parametrize("threads", [1, 2])
def test_exp_and_log_do_not_depend_on_place_length_or_threads(threads):
    x = logits_smooth(200_000, 1)
    highest = x.amax()
    survival = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(200_000)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        mass = fixed_point_mass(x, highest)
        logs = torch.log(survival)
        noise = gumbel.gumbel_noise(ids, seed=1, position=2, choice=3)
        for offset in [*range(20), 4_096, 65_537, 100_001]:
            for length in (1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 1_000, 40_001):
                part = slice(offset, offset + length)
                assert_same_bits(fixed_point_mass(x[part], highest), mass[part])
                assert_same_bits(torch.log(survival[part]), logs[part])
                if length < 100:
                    alone = gumbel.gumbel_noise(ids[part], seed=1, position=2, choice=3)
                    assert_same_bits(alone, noise[part])
        picked = torch.randperm(200_000, generator=torch.Generator().manual_seed(3))[:5_001]
        assert_same_bits(fixed_point_mass(x[picked], highest), mass[picked])
    finally:
        torch.set_num_threads(before)


# --- log-probabilities ---


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 20.0])
def test_log_probabilities_are_as_accurate_as_stated(vocabulary, scale):
    x = logits_smooth(vocabulary, 4, scale)[None]
    exact = torch.log_softmax(x.to(torch.float64), -1)
    found = log_probabilities(x, x.amax(-1, keepdim=True), log_mass(x, x.amax(-1))[:, None])
    rounding = exact.abs() * 2.0**-24
    assert float(((found - exact).abs() - rounding).max()) < 9e-7


def test_the_mass_of_the_largest_vocabulary_does_not_overflow():
    x = torch.zeros(1, 1 << 22)
    assert float(log_mass(x, x.amax(-1))) == math.log(1 << 22)
    with pytest.raises(ValueError, match="4194305"):
        log_mass(torch.zeros(1, (1 << 22) + 1), torch.zeros(1))


def test_the_mass_is_the_same_over_any_shards_and_a_float_sum_is_not():
    x = logits_smooth(32_003, 5)
    mass = fixed_point_mass(x, x.amax())
    cuts = [0, 1, 999, 8_000, 8_001, 32_003]
    parts = [
        int(fixed_point_mass(x[a:b].clone(), x.amax()).sum()) for a, b in itertools.pairwise(cuts)
    ]
    assert sum(parts) == int(mass.sum()) == sum(mass.tolist())
    floats = torch.exp(x - x.amax())
    sums = {float(sum(part.sum() for part in floats.split(n))) for n in (32_003, 997, 64, 7)}
    assert len(sums) > 1, "the control must show that the order of a float sum matters"


# --- selection ---


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


# --- penalties, temperature ---


def test_bias_and_penalties_come_in_the_frozen_order_with_one_rounding_each(monkeypatch):
    x = logits_smooth(300, 12)
    prompt, output = [5, 6, 7, 5, 20], [7, 9, 9, 9, 30, 5]
    bias = {5: 1.25, 9: -100.0, 299: 0.1}
    f = numpy.float32
    expected = [f(v) for v in x.tolist()]
    for token, value in bias.items():
        expected[token] = expected[token] + f(value)
    for token in sorted({*prompt, *output}):
        v = expected[token]
        expected[token] = v / f(1.3) if v > 0 else v * f(1.3)
    for token in sorted(set(output)):
        expected[token] = expected[token] - f(0.7) * f(output.count(token))
        expected[token] = expected[token] - f(-0.3)
    expected[33] = f(-math.inf)
    seen = {}
    monkeypatch.setattr(torch, "argmax", lambda y: seen.setdefault("logits", y)[0] * 0)
    how = Draw(
        temperature=0.0, seed=0, position=11, bias=bias, repetition_penalty=1.3,
        frequency_penalty=0.7, presence_penalty=-0.3, prompt_ids=prompt, output_ids=output,
        forbidden=(33,),
    )  # fmt: skip
    choose_token(x, how)
    assert_same_bits(seen["logits"], torch.tensor(numpy.array(expected)))


def test_extreme_penalties_and_temperatures_never_make_a_nan_or_an_empty_choice():
    for penalty in (1e-300, 1e-39, 1e39, 1e300):
        for temperature in (0.0, 1e-3, 2.0):
            for x in (torch.full((50,), -3e38), torch.zeros(50), torch.full((50,), 3e38)):
                how = Draw(
                    temperature=temperature, seed=1, position=50, repetition_penalty=penalty,
                    output_ids=list(range(50)), top_k=10, top_p=0.5, min_p=0.1,
                )  # fmt: skip
                assert 0 <= choose_token(x, how) < 50


def test_temperature_divides_and_keeps_minus_infinity():
    x = torch.tensor([3e38, -3e38, -torch.inf, 1.0, -0.0])
    scaled = scale_by_temperature(x, 0.001)
    largest = torch.finfo(torch.float32).max
    one = float(numpy.float32(1.0) / numpy.float32(0.001))
    assert_same_bits(scaled, torch.tensor([largest, -largest, -torch.inf, one, 0.0]))


def test_a_tiny_temperature_takes_the_largest_and_a_huge_one_spreads():
    x = torch.arange(10.0)
    cold = {choose_token(x, Draw(temperature=1e-3, seed=1, position=p)) for p in range(100)}
    assert cold == {9}
    hot = {choose_token(x, Draw(temperature=1e6, seed=1, position=p)) for p in range(200)}
    assert hot == set(range(10))


def test_greedy_takes_the_lowest_of_equal_largest_whatever_the_size():
    for vocabulary in VOCABULARIES:
        x = logits_smooth(vocabulary, 13)
        for places in ([vocabulary - 1], [700, vocabulary - 2], [1, 2, vocabulary // 2]):
            y = x.clone()
            y[places] = 50.0
            assert choose_token(y, Draw(temperature=0.0, seed=0, position=0)) == places[0]
    zeros = torch.tensor([-1.0, -0.0, 0.0])
    assert choose_token(zeros, Draw(temperature=0.0, seed=0, position=0)) == 1


def test_forbidden_ids_are_never_chosen_and_nothing_left_is_told():
    x = torch.tensor([9.0, 8.0, 1.0, -torch.inf])
    for temperature in (0.0, 1.0):
        how = Draw(temperature=temperature, seed=1, position=1, forbidden=(0, 1))
        assert choose_token(x, how) == 2
        nothing = Draw(temperature=temperature, seed=1, position=1, forbidden=(0, 1, 2))
        assert choose_token(x, nothing) == NO_TOKEN


def test_choosing_does_not_change_the_logits():
    x = logits_with_ties(100, 14)
    before = x.clone()
    choose_token(x, Draw(temperature=0.7, seed=1, position=1, bias={3: 1.0}, forbidden=(2,)))
    assert_same_bits(x, before)


# --- the draw ---


def exact_choice(x: torch.Tensor, how: Draw) -> int:
    """The whole chain by lists and fractions; only exp, log and Philox are the kernels'."""
    values = scale_by_temperature(x, how.temperature)
    kept = total_order(values)
    if how.top_k > 0:
        kept = kept[: how.top_k]
    kept = torch.tensor(sorted(kept))
    if how.top_p < 1.0:
        kept = kept[exact_top_p(values[kept], top_p_numerator(how.top_p))]
    if how.min_p > 0.0:
        kept = kept[keep_min_p(values[kept], how.min_p)]
    noise = gumbel.gumbel_noise(
        torch.arange(x.numel()), seed=how.seed, position=how.position, choice=how.choice
    )
    scores = [(-float(values[i] + noise[i]), i) for i in kept.tolist()]
    return min(scores)[1]


def test_the_chain_equals_the_slow_reference():
    for vocabulary in (1_000, 4_099):
        for seed in range(12):
            x = logits_with_ties(vocabulary, seed) if seed % 2 else logits_smooth(vocabulary, seed)
            how = Draw(
                temperature=(0.3, 1.0, 1.7)[seed % 3], seed=seed << 40 | 5, position=seed * 1_000,
                choice=seed % 5, top_k=(-1, 5, 700)[seed % 3], top_p=(1.0, 0.6)[seed // 2 % 2],
                min_p=(0.0, 0.05)[seed // 3 % 2],
            )  # fmt: skip
            assert choose_token(x, how) == exact_choice(x, how)


def test_noise_is_the_formula_rounded_once(monkeypatch):
    words = torch.tensor([0, 1, 2, 1 << 31, (1 << 32) - 2, (1 << 32) - 1, *range(5, 1 << 32, 9**8)])
    monkeypatch.setattr(gumbel, "philox_words", lambda ids, **_: words)
    noise = gumbel.gumbel_noise(words, seed=0, position=0, choice=0)
    v = [(w + 0.5) * 2.0**-32 for w in words.tolist()]
    exact = torch.tensor([-math.log(-math.log1p(-u)) for u in v], dtype=torch.float64)
    assert float(((noise - exact).abs() - exact.abs() * 2.0**-24).max()) < 1e-13
    assert torch.isfinite(noise).all()
    assert -3.14 < float(noise.min()) < -3.12 and 22.87 < float(noise.max()) < 22.88


def test_sampling_follows_the_softmax():
    x = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -torch.inf])
    expected = torch.softmax(x / 0.8, 0) * 4_000
    counts = torch.zeros(6)
    for position in range(4_000):
        counts[choose_token(x, Draw(temperature=0.8, seed=99, position=position))] += 1
    assert counts[5] == 0
    assert float(((counts - expected)[:5] ** 2 / expected[:5]).sum()) < 18.5  # 4 d.o.f., p 0.001


def test_choices_and_positions_draw_independently():
    x = torch.zeros(2)
    pairs = torch.zeros(4)
    for position in range(1_000):
        first, second = (
            choose_token(x, Draw(temperature=1.0, seed=5, position=position, choice=choice))
            for choice in (0, 1)
        )
        pairs[2 * first + second] += 1
    assert float(((pairs - 250) ** 2 / 250).sum()) < 16.3  # 3 d.o.f., p 0.001


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_thread_counts_do_not_change_a_token_or_a_logprob(vocabulary):
    x = torch.stack([logits_smooth(vocabulary, 15), logits_with_ties(vocabulary, 15)])
    before = torch.get_num_threads()
    answers = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            tokens = [
                choose_token(row, Draw(temperature=1.0, seed=s, position=s, top_p=p, top_k=k))
                for row in x
                for s, p, k in ((1, 1.0, -1), (2, 0.9, -1), (3, 0.8, 500))
            ]
            answers.append((tokens, log_mass(x, x.amax(-1))))
    finally:
        torch.set_num_threads(before)
    assert answers[0][0] == answers[1][0]
    assert same_bits(answers[0][1], answers[1][1])
