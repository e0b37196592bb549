"""Log-probabilities: one bit class at any place, length and thread count; accuracy; the mass."""

import itertools
import math

import pytest
import torch

from tests.kernels.cpu.sample_logits import (
    VOCABULARIES,
    logits_smooth,
)
from tests.lib.bits import assert_same_bits
from tpdet.kernels.cpu.sampling import noise as cpu_noise
from tpdet.kernels.cpu.sampling.noise import fixed_point_mass, log_mass
from tpdet.kernels.exact.thresholds import log_probabilities


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
        noise = cpu_noise.gumbel_noise(ids, seed=1, position=2, choice=3)
        for offset in [*range(20), 4_096, 65_537, 100_001]:
            for length in (1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 1_000, 40_001):
                part = slice(offset, offset + length)
                assert_same_bits(fixed_point_mass(x[part], highest), mass[part])
                assert_same_bits(torch.log(survival[part]), logs[part])
                if length < 100:
                    alone = cpu_noise.gumbel_noise(ids[part], seed=1, position=2, choice=3)
                    assert_same_bits(alone, noise[part])
        picked = torch.randperm(200_000, generator=torch.Generator().manual_seed(3))[:5_001]
        assert_same_bits(fixed_point_mass(x[picked], highest), mass[picked])
    finally:
        torch.set_num_threads(before)


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
