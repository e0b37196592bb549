"""A sequence with its reference attention, its pages, and the variants that must agree on it."""

import random

import torch

from tests.gpu.lib.checks import same
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.attention.variants import (
    AttentionVariant,
    decode_variant,
    prefill_variant,
)
from tpdet.kernels.cuda.hardware import gpu_of
from tpdet.kernels.cuda.pointwise import embedding
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

PAGE = 256
ALL_LONG, ALL_SHORT = 0, 1 << 20
KINDS = ("normal", "heavy", "cancelling", "tiny")
REFERENCE = AttentionVariant(64, 4, 2), AttentionVariant(16, 4, 2)
PREFILL = [
    AttentionVariant(16, 1, 2),
    AttentionVariant(16, 4, 3),
    AttentionVariant(32, 2, 2),
    AttentionVariant(32, 4, 3),
    AttentionVariant(64, 4, 2),
    AttentionVariant(64, 4, 3, True),
    AttentionVariant(64, 8, 2),
    AttentionVariant(128, 4, 2),
    AttentionVariant(128, 8, 3),
    AttentionVariant(128, 8, 2, True),
    AttentionVariant(128, 4, 3, True, warp_specialised=True),
    AttentionVariant(128, 4, 5, True, warp_specialised=True),
]
DECODE = [
    AttentionVariant(16, 1, 3),
    AttentionVariant(16, 2, 3),
    AttentionVariant(16, 4, 2),
    AttentionVariant(32, 4, 2),
    AttentionVariant(64, 4, 2),
    AttentionVariant(128, 8, 2),
    AttentionVariant(16, 4, 2, fused=True),
    AttentionVariant(16, 4, 1, swapped=True),
    AttentionVariant(16, 4, 2, swapped=True),
    AttentionVariant(16, 4, 3, fused=True, swapped=True),
    AttentionVariant(32, 4, 2, fused=True, swapped=True),
    AttentionVariant(64, 4, 1, fused=True, swapped=True),
]
SHAPES = [  # dtype, head, query heads, key heads, window
    (torch.bfloat16, 128, 32, 8, None),
    (torch.bfloat16, 128, 8, 2, 300),
    (torch.bfloat16, 64, 6, 2, 77),
    (torch.bfloat16, 256, 4, 2, None),
    (torch.float16, 96, 8, 8, None),
    (torch.float16, 128, 5, 1, None),
    (torch.float32, 64, 4, 2, 300),
    (torch.float32, 128, 4, 1, None),
    (torch.float32, 256, 2, 2, None),
]


def draw(*shape, dtype, kind="normal", seed=0):
    """As `checks.draw`, but for values that scores can still tell apart."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cuda")
    if kind == "heavy":
        x = x * torch.randn(*shape, generator=generator, device="cuda").mul(2).exp()
        x = x.clamp(-1e4, 1e4)
    if kind == "cancelling":
        x[..., 1::2] = -x[..., 0::2] * (1 + 1e-3)
    if kind == "tiny":
        x = x * 1e-6
    return x.to(dtype)


class Case:
    """q, k, v of one sequence and the reference output over all of it (pages otherwise NaN)."""

    def __init__(self, shape, length, kind="normal", seed=0, sinks=None):
        """sinks: fp32 by query head, or None."""
        self.sinks = sinks
        self.dtype, self.head, self.query_heads, self.key_heads, self.window = shape
        options = {"dtype": self.dtype, "kind": kind}
        self.length = length
        self.q = draw(length, self.query_heads, self.head, seed=seed, **options) * 2
        self.k = draw(length, self.key_heads, self.head, seed=seed + 1, **options)
        self.v = draw(length, self.key_heads, self.head, seed=seed + 2, **options)
        self.reference = self.whole(length, REFERENCE[0], ALL_LONG)
        if not torch.isfinite(self.reference).all():
            raise AssertionError("the reference holds NaN or infinity")

    def pool(self, pages):
        shape = (pages, self.key_heads, PAGE, self.head)
        return [torch.full(shape, torch.nan, dtype=self.dtype, device="cuda") for _ in "kv"]

    def store(self, first, end, pages, batch):
        self.store_rows(self.k[first:end], self.v[first:end], pages, batch)

    def store_rows(self, keys, values, pages, batch):
        embedding.store_kv(keys, values, *pages, batch)

    def attend(self, q, pages, batch, prefill=None, decode=None):
        gpu = gpu_of(q.device)
        prefill = prefill or prefill_variant(self.dtype, self.head, gpu, self.sinks is None)
        rows = batch.short_rows * self.query_heads // self.key_heads
        splits, sequences = batch.splits.shape[0], batch.short.shape[0]
        decode = decode or decode_variant(self.dtype, self.head, rows, splits, sequences)
        return attention.attend(q, *pages, batch, self.window, prefill, decode, 0.0, self.sinks)

    def whole(self, length, variant, short):
        mapping = shuffled(length)
        pages = self.pool(len(mapping) + 2)
        batch = make_batch((PagedSequence(0, length, 0, mapping),), "cuda", short)
        self.store(0, length, pages, batch)
        long = short == ALL_LONG
        variants = (variant, None) if long else (None, variant)
        return self.attend(self.q[:length], pages, batch, *variants)


def shuffled(length, seed=1, spare=2):
    count = -(-length // PAGE)
    return tuple(random.Random(seed).sample(range(count + spare), count))


def cut_into_chunks(data: Case, length, chance, prefill, decode):
    """Chunks of random sizes, variants and ways; keys are stored chunk by chunk."""
    mapping = shuffled(length, chance.random())
    pages, done = data.pool(len(mapping) + 2), 0
    while done < length:
        count = min(chance.choice((1, 1, 2, 7, 16, 64, 130, 256, 600)), length - done)
        short = chance.choice((ALL_LONG, 16, ALL_SHORT))
        batch = make_batch((PagedSequence(0, count, done, mapping),), "cuda", short)
        data.store(done, done + count, pages, batch)
        part = data.attend(
            data.q[done : done + count], pages, batch, chance.choice(prefill), chance.choice(decode)
        )
        same(part, data.reference[done : done + count], f"length {length}, chunk at {done}")
        done += count
