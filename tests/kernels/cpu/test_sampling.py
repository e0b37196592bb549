"""How a token is chosen: penalties, temperature and the sample, against slow exact references."""

import math

import numpy
import pytest
import torch

from tests.kernels.cpu.sample_logits import (
    VOCABULARIES,
    exact_top_p,
    logits_smooth,
    logits_with_ties,
    total_order,
)
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels.cpu.sampling import noise as cpu_noise
from tpdet.kernels.cpu.sampling.noise import log_mass
from tpdet.kernels.cpu.sampling.tokens import (
    NO_TOKEN,
    choose_token,
    keep_min_p,
)
from tpdet.kernels.exact.thresholds import scale_by_temperature, top_p_numerator
from tpdet.kernels.inputs.row_params import RowParams


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
    how = RowParams(
        temperature=0.0,
        seed=0,
        position=11,
        bias=bias,
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        presence_penalty=-0.3,
        prompt_ids=prompt,
        output_ids=output,
        forbidden=(33,),
    )
    choose_token(x, how)
    assert_same_bits(seen["logits"], torch.tensor(numpy.array(expected)))


def test_extreme_penalties_and_temperatures_never_make_a_nan_or_an_empty_choice():
    for penalty in (1e-300, 1e-39, 1e39, 1e300):
        for temperature in (0.0, 1e-3, 2.0):
            for x in (torch.full((50,), -3e38), torch.zeros(50), torch.full((50,), 3e38)):
                how = RowParams(
                    temperature=temperature,
                    seed=1,
                    position=50,
                    repetition_penalty=penalty,
                    output_ids=list(range(50)),
                    top_k=10,
                    top_p=0.5,
                    min_p=0.1,
                )
                assert 0 <= choose_token(x, how) < 50


def test_temperature_divides_and_keeps_minus_infinity():
    x = torch.tensor([3e38, -3e38, -torch.inf, 1.0, -0.0])
    scaled = scale_by_temperature(x, 0.001)
    largest = torch.finfo(torch.float32).max
    one = float(numpy.float32(1.0) / numpy.float32(0.001))
    assert_same_bits(scaled, torch.tensor([largest, -largest, -torch.inf, one, 0.0]))


def test_a_tiny_temperature_takes_the_largest_and_a_huge_one_spreads():
    x = torch.arange(10.0)
    cold = {choose_token(x, RowParams(temperature=1e-3, seed=1, position=p)) for p in range(100)}
    assert cold == {9}
    hot = {choose_token(x, RowParams(temperature=1e6, seed=1, position=p)) for p in range(200)}
    assert hot == set(range(10))


def test_greedy_takes_the_lowest_of_equal_largest_whatever_the_size():
    for vocabulary in VOCABULARIES:
        x = logits_smooth(vocabulary, 13)
        for places in ([vocabulary - 1], [700, vocabulary - 2], [1, 2, vocabulary // 2]):
            y = x.clone()
            y[places] = 50.0
            assert choose_token(y, RowParams(temperature=0.0, seed=0, position=0)) == places[0]
    zeros = torch.tensor([-1.0, -0.0, 0.0])
    assert choose_token(zeros, RowParams(temperature=0.0, seed=0, position=0)) == 1


def test_forbidden_ids_are_never_chosen_and_nothing_left_is_told():
    x = torch.tensor([9.0, 8.0, 1.0, -torch.inf])
    for temperature in (0.0, 1.0):
        how = RowParams(temperature=temperature, seed=1, position=1, forbidden=(0, 1))
        assert choose_token(x, how) == 2
        nothing = RowParams(temperature=temperature, seed=1, position=1, forbidden=(0, 1, 2))
        assert choose_token(x, nothing) == NO_TOKEN


def test_choosing_does_not_change_the_logits():
    x = logits_with_ties(100, 14)
    before = x.clone()
    choose_token(x, RowParams(temperature=0.7, seed=1, position=1, bias={3: 1.0}, forbidden=(2,)))
    assert_same_bits(x, before)


def exact_choice(x: torch.Tensor, how: RowParams) -> int:
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
    noise = cpu_noise.gumbel_noise(
        torch.arange(x.numel()), seed=how.seed, position=how.position, choice=how.choice
    )
    scores = [(-float(values[i] + noise[i]), i) for i in kept.tolist()]
    return min(scores)[1]


def test_the_chain_equals_the_slow_reference():
    for vocabulary in (1_000, 4_099):
        for seed in range(12):
            x = logits_with_ties(vocabulary, seed) if seed % 2 else logits_smooth(vocabulary, seed)
            how = RowParams(
                temperature=(0.3, 1.0, 1.7)[seed % 3],
                seed=seed << 40 | 5,
                position=seed * 1_000,
                choice=seed % 5,
                top_k=(-1, 5, 700)[seed % 3],
                top_p=(1.0, 0.6)[seed // 2 % 2],
                min_p=(0.0, 0.05)[seed // 3 % 2],
            )
            assert choose_token(x, how) == exact_choice(x, how)


def test_noise_is_the_formula_rounded_once(monkeypatch):
    words = torch.tensor([0, 1, 2, 1 << 31, (1 << 32) - 2, (1 << 32) - 1, *range(5, 1 << 32, 9**8)])
    monkeypatch.setattr(cpu_noise, "philox_words", lambda ids, **_: words)
    noise = cpu_noise.gumbel_noise(words, seed=0, position=0, choice=0)
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
        counts[choose_token(x, RowParams(temperature=0.8, seed=99, position=position))] += 1
    assert counts[5] == 0
    assert float(((counts - expected)[:5] ** 2 / expected[:5]).sum()) < 18.5  # 4 d.o.f., p 0.001


def test_choices_and_positions_draw_independently():
    x = torch.zeros(2)
    pairs = torch.zeros(4)
    for position in range(1_000):
        first, second = (
            choose_token(x, RowParams(temperature=1.0, seed=5, position=position, choice=choice))
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
                choose_token(row, RowParams(temperature=1.0, seed=s, position=s, top_p=p, top_k=k))
                for row in x
                for s, p, k in ((1, 1.0, -1), (2, 0.9, -1), (3, 0.8, 500))
            ]
            answers.append((tokens, log_mass(x, x.amax(-1))))
    finally:
        torch.set_num_threads(before)
    assert answers[0][0] == answers[1][0]
    assert same_bits(answers[0][1], answers[1][1])
