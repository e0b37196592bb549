"""The words, noise and masses that draws are made of, in Triton's interpreter or on a GPU.

Cases of `tests/kernels/interpreted/draws.py`.
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling import gumbel_scores, log_softmax
from tpdet.kernels.exact.philox import philox_words


@triton.jit
def noise_of(words, rough, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at).to(tl.uint32)
    tl.store(rough + at, gumbel_scores.rough_noise(word))


@triton.jit
def philox_words_of(ids, words, position, choice, key0, key1, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    keys = tl.load(key0).to(tl.uint32), tl.load(key1).to(tl.uint32)
    where = tl.load(position).to(tl.uint32), tl.load(choice).to(tl.uint32)
    word = gumbel_scores.philox_of(tl.load(ids + at), where[0], where[1], keys[0], keys[1])
    tl.store(words + at, word.to(tl.int64))


def rough_noise_is_near_the_noise():
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


def philox_words_are_the_cpus():
    ids = torch.arange(1024) * 4093 % (1 << 22)
    for seed in (0, 2**32 - 1, 2**32, 2**64 - 3):
        for position, choice in ((0, 0), (2**32 - 1, 5), (77, 2**31)):
            words = torch.empty(1024, dtype=torch.int64)
            given = [torch.tensor([n]) for n in (position, choice, seed & 0xFFFFFFFF, seed >> 32)]
            philox_words_of[1,](ids, words, *given, 1024)
            assert torch.equal(
                words, philox_words(ids, seed=seed, position=position, choice=choice)
            )


@triton.jit
def masses_of(x, ours, plain, BLOCK: tl.constexpr):
    """Fixed-point masses against 0, as the kernels make them and by rounding and conversion."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(ours + at, log_softmax.fixed_point(value, 0.0))
    scaled = tl.exp2((value - 0.0) * 1.4426950408889634).to(tl.float64) * 1099511627776.0
    rounded = (scaled + 6755399441055744.0) - 6755399441055744.0
    tl.store(plain + at, rounded.to(tl.int64))


def masses_are_rounded_conversions(device="cpu", count=1 << 16):
    steps = torch.arange(count - 1024, device=device, dtype=torch.float32) * (-40.0 / count)
    x = torch.cat([steps, torch.full((1024,), -torch.inf, device=device)])
    ours, plain = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    masses_of[count // 1024,](x, ours, plain, 1024, enable_fp_fusion=False)
    assert torch.equal(ours, plain) and int(ours.max()) == 1 << 40
