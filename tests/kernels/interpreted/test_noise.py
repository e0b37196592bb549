"""The words, noise and masses that samples are made of, in Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.random import philox_impl

from tests.lib.kernels.masses import masses_are_rounded_conversions
from tpdet.kernels.cuda.sampling import noise
from tpdet.kernels.exact.philox import philox_words


@triton.jit
def noise_of(words, rough, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at).to(tl.uint32)
    tl.store(rough + at, noise.rough_noise(word))


@triton.jit
def philox_words_of(ids, words, position, choice, key0, key1, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    keys = tl.load(key0).to(tl.uint32), tl.load(key1).to(tl.uint32)
    where = tl.load(position).to(tl.uint32), tl.load(choice).to(tl.uint32)
    word = noise.philox_of(tl.load(ids + at), (where[0], where[1], keys[0], keys[1]))
    tl.store(words + at, word.to(tl.int64))


@triton.jit
def tritons_words_of(ids, words, position, choice, key0, key1, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    id = tl.load(ids + at).to(tl.uint32)
    zero = tl.zeros_like(id)
    keys = tl.load(key0).to(tl.uint32), tl.load(key1).to(tl.uint32)
    where = tl.load(position).to(tl.uint32), tl.load(choice).to(tl.uint32)
    word, _, _, _ = philox_impl(id, zero + where[0], zero + where[1], zero, keys[0], keys[1])
    tl.store(words + at, word.to(tl.int64))


def test_rough_noise_is_near_the_noise():
    edges = torch.tensor([0, 1, 2, 3, 2**28, 2**29 - 1, 2**29, 2**29 + 1, 2**31])
    steps = torch.arange(0, 2**32, 2**32 // 4000)
    powers = 2 ** torch.arange(32)
    words = torch.cat([edges, steps, powers, 2**32 - 1 - powers])
    words = torch.cat([words, words.new_zeros(-len(words) % 1024)])
    rough = torch.empty(len(words))
    noise_of[len(words) // 1024,](words, rough, 1024)
    survival = 1.0 - (words.double() + 0.5) * 2.0**-32
    error = (rough.double() + torch.log(-torch.log(survival))).abs().max()
    assert error < 1e-4, error


@pytest.mark.parametrize("words_of", [philox_words_of, tritons_words_of], ids=["ours", "triton"])
def test_philox_words_are_the_cpus(words_of):
    ids = torch.arange(1024) * 4093 % (1 << 22)
    for seed in (0, 2**32 - 1, 2**32, 2**64 - 3):
        for position, choice in ((0, 0), (2**32 - 1, 5), (77, 2**31)):
            words = torch.empty(1024, dtype=torch.int64)
            given = [torch.tensor([n]) for n in (position, choice, seed & 0xFFFFFFFF, seed >> 32)]
            words_of[1,](ids, words, *given, 1024)
            assert torch.equal(
                words, philox_words(ids, seed=seed, position=position, choice=choice)
            )


def test_masses_are_rounded_conversions():
    masses_are_rounded_conversions()
