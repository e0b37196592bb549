"""Keys and values in fp8 on a GPU: pages have the CPU's bytes, attention reads their numbers.

Every kernel over fp8 pages is held against the same rows over pages of the model's dtype that hold
the numbers which the codes stand for.
"""

import random

import torch

from tests.gpu.attention.case import ALL_LONG, ALL_SHORT, DECODE, PREFILL, draw, shuffled
from tests.gpu.lib.checks import same
from tests.gpu.lib.suite import Check
from tpdet.kernels.cpu.pointwise import embedding as cpu_embedding
from tpdet.kernels.cpu.pointwise import rotate_and_store as cpu_rotation
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.attention.variants import (
    WIDE_ROWS,
    AttentionVariant,
    decode_variant,
    prefill_variant,
)
from tpdet.kernels.cuda.hardware import gpu_of
from tpdet.kernels.cuda.launch.multiprocessors import leaving
from tpdet.kernels.cuda.pointwise import embedding
from tpdet.kernels.cuda.pointwise.rotate_and_store import (
    FEW_ROWS,
    MANY_ROWS,
    rotate_and_store_as,
)
from tpdet.kernels.exact.fp8_rows import decode_rows, fp8_page_bytes, rows_of
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.known.kv_golden import golden_rows

KINDS = "normal", "heavy", "tiny"
REFERENCE = AttentionVariant(16, 4, 1)  # of numbers
FEW, MANY = AttentionVariant(16, 4, 1, swapped=True), AttentionVariant(64, 4, 2)
STREAMED = [
    AttentionVariant(rows, 4, stages, swapped=True, streamed=True)
    for rows in (8, 16)
    for stages in (4, 6)
]
_WIDE = [v for v in PREFILL if not v.descriptors and v.rows >= WIDE_ROWS]
_SWAPPED = [variant for variant in DECODE if variant.swapped]
SHAPES = [  # dtype, head, query heads, key heads, window, cap, sinks
    (torch.bfloat16, 128, 32, 8, None, 0.0, False),
    (torch.bfloat16, 128, 8, 2, 300, 0.0, False),
    (torch.bfloat16, 64, 16, 2, 128, 0.0, True),
    (torch.bfloat16, 256, 8, 4, None, 50.0, False),
    (torch.float16, 64, 14, 2, None, 0.0, False),
    (torch.float16, 96, 8, 8, None, 0.0, False),
    (torch.float32, 64, 4, 2, 300, 0.0, False),
]
SMALL = torch.bfloat16, 64, 14, 2, None, 0.0, False


def fp8_pool(pages, key_heads, head, device="cuda"):
    """K and V of so many pages, NaN everywhere."""
    shape = (pages, key_heads, fp8_page_bytes(head))
    return [torch.full(shape, 255, dtype=torch.uint8, device=device) for _ in "kv"]


def golden_bytes():
    """Golden rows, and random ones, as stored by every kernel: the CPU's bytes."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        golden = golden_rows(dtype).view(-1, 1, 64).expand(-1, 8, -1).contiguous()
        for heads, head in ((8, 64), (8, 128), (3, 96), (1, 256)):
            k, v = (draw(300, heads, head, dtype=dtype, kind=kind) for kind in ("heavy", "tiny"))
            k, v = k.cpu(), v.cpu()
            k[:, :, 1] *= 1000.0
            v[5], v[6, :, 3], v[7, :, 4] = 0.0, torch.nan, torch.inf
            if head == 64:
                k[: len(golden)], v[: len(golden)] = golden, golden.flip(0)
            sequence = (PagedSequence(0, 300, 100, (1, 0)),)
            theirs, ours = fp8_pool(2, heads, head, "cpu"), fp8_pool(2, heads, head)
            cpu_embedding.store_kv(k, v, *theirs, make_batch(sequence))
            batch = make_batch(sequence, "cuda")
            embedding.store_kv(k.cuda(), v.cuda(), *ours, batch)
            for mine, other in zip(ours, theirs, strict=True):
                same(mine.cpu(), other, f"store_kv, {dtype}, {heads} heads of {head}")
            angle = draw(400, head // 2, dtype=torch.float32)
            tables, norms = (angle.cos(), angle.sin()), draw(2, head, dtype=dtype)
            q = draw(300, 2 * heads, head, dtype=dtype)
            for norm in ((None, None), (norms[0], norms[1])):
                host = tuple(None if n is None else n.cpu() for n in norm)
                on_host = tuple(x.cpu() for x in tables)
                wanted = cpu_rotation.rotate_and_store(
                    q.cpu(), k, v, on_host, host, 1e-6, theirs, make_batch(sequence)
                )
                for heads_each in (FEW_ROWS, MANY_ROWS):
                    ours = fp8_pool(2, heads, head)
                    how = tables, norm, 1e-6, ours, batch, heads_each
                    same(rotate_and_store_as(q, k.cuda(), v.cuda(), *how).cpu(), wanted, "q")
                    for mine, other in zip(ours, theirs, strict=True):
                        same(mine.cpu(), other, f"rotated, {dtype}, {heads} heads of {head}")


class StoredCase:
    """q of a sequence, its fp8 pages, and pages of the numbers that these stand for."""

    def __init__(self, shape, length, kind="normal", seed=0):
        self.dtype, self.head, self.query_heads, key_heads, self.window, self.cap, sinks = shape
        how = {"dtype": self.dtype, "kind": kind}
        self.q = draw(length, self.query_heads, self.head, seed=seed, **how) * 2
        self.k, self.v = (draw(length, key_heads, self.head, seed=seed + s, **how) for s in (1, 2))
        self.sinks = draw(self.query_heads, dtype=torch.float32) if sinks else None
        self.length, self.mapping = length, shuffled(length, seed + 1)
        self.stored = fp8_pool(len(self.mapping) + 2, key_heads, self.head)
        self.store(0, length, self.stored)
        self.numbers = [decode_rows(*rows_of(x, self.head), self.dtype) for x in self.stored]
        self.wanted = self.attend(0, length, self.numbers, ALL_LONG, REFERENCE, REFERENCE)
        if not torch.isfinite(self.wanted).all():
            raise AssertionError("the reference holds NaN or infinity")

    def store(self, first, end, pages):
        batch = make_batch((PagedSequence(0, end - first, first, self.mapping),), "cuda")
        embedding.store_kv(self.k[first:end], self.v[first:end], *pages, batch)

    def attend(self, first, end, pages, short, prefill=None, decode=None):
        sequence = PagedSequence(0, end - first, first, self.mapping)
        batch = make_batch((sequence,), "cuda", short)
        q, how = self.q[first:end], (batch, self.window)
        if prefill is None:
            return attention.paged_attention(q, *pages, *how, self.cap, self.sinks)
        return attention.attend(q, *pages, *how, prefill, decode, self.cap, self.sinks)


def every_prefill(shape, kinds, variants):
    """Rows of a prompt by every form."""
    for kind in kinds:
        case = StoredCase(shape, 1100, kind)
        for variant in variants:
            got = case.attend(300, 1100, case.stored, ALL_LONG, variant, FEW)
            same(got, case.wanted[300:], f"{kind}, {variant}")


def every_decode(shape, kinds, variants):
    """Few rows by every form."""
    for kind in kinds:
        case = StoredCase(shape, 1100, kind)
        for variant in variants:
            for first, end in ((1099, 1100), (1095, 1100), (256, 257), (0, 1)):
                got = case.attend(first, end, case.stored, ALL_SHORT, MANY, variant)
                same(got, case.wanted[first:end], f"{kind}, {variant}, rows {first} to {end}")


def chunks_of_every_size(shape, kinds):
    """Chunks of random sizes, their keys stored in turn, by the kernels that are chosen."""
    for kind in kinds:
        case, chance = StoredCase(shape, 1100, kind), random.Random(kind)
        for _ in range(3):
            pages, done = fp8_pool(*case.stored[0].shape[:2], case.head), 0
            while done < case.length:
                count = min(chance.choice((1, 1, 2, 7, 16, 64, 130, 600)), case.length - done)
                case.store(done, done + count, pages)
                short = chance.choice((ALL_LONG, 16, ALL_SHORT))
                got = case.attend(done, done + count, pages, short)
                same(got, case.wanted[done : done + count], f"{kind}, {count} rows at {done}")
                done += count
            for mine, other in zip(pages, case.stored, strict=True):
                same(mine, other, "pages that were stored in chunks")


def warp_specialised_reference():
    """Pages of numbers in the fast prefill kernel: the bits of fp8 pages in the general one."""
    case = StoredCase(SHAPES[0], 1500, "heavy")
    fast = prefill_variant(torch.bfloat16, 128, gpu_of(case.q.device))
    got = case.attend(0, 1500, case.numbers, ALL_LONG, fast, REFERENCE)
    same(got, case.attend(0, 1500, case.stored, ALL_LONG), "warp-specialised")


def streamed(shape, most, lengths):
    """Sequences of these lengths with 1 to `most` rows, by every choice of programs."""
    cases = [StoredCase(shape, length, KINDS[i % 2], i) for i, length in enumerate(lengths)]
    chance, sequences, parts, wanted, row, before = random.Random(1), [], [], [], 0, 0
    for case in cases:
        count = min(case.length, chance.randrange(1, most + 1))
        mapping = tuple(before + number for number in case.mapping)
        sequences.append(PagedSequence(row, count, case.length - count, mapping))
        parts.append(case.q[case.length - count :])
        wanted.append(case.wanted[case.length - count :])
        row, before = row + count, before + len(case.stored[0])
    pages = [torch.cat([case.stored[i] for case in cases]) for i in (0, 1)]
    q, wanted, batch = torch.cat(parts), torch.cat(wanted), make_batch(tuple(sequences), "cuda")
    least = batch.short_rows * shape[2] // shape[3]
    for free in (0, 1, 50, 100, 129, 131):
        for variant in (v for v in STREAMED if v.rows >= least):
            with leaving(free):
                got = attention.attend(q, *pages, batch, None, MANY, variant)
            same(got, wanted, f"{free} left free, {variant}")
    usual = decode_variant(q.dtype, shape[1], least)
    same(attention.attend(q, *pages, batch, None, MANY, usual), wanted, f"{usual}")


def not_finite(position=600):
    """A NaN in a key, infinity in a value: rows before it keep their bits, later ones are NaN."""
    for into in ("k", "v"):
        case = StoredCase(SHAPES[0], 900)
        getattr(case, into)[position, 3, 17] = torch.nan if into == "k" else torch.inf
        case.store(0, 900, case.stored)
        for short in (ALL_LONG, ALL_SHORT):
            got = case.attend(0, 900, case.stored, short).view(900, 8, 4, 128)
            wanted = case.wanted.view(900, 8, 4, 128)
            same(got[:position], wanted[:position], "rows before")
            others = [head for head in range(8) if head != 3]
            same(got[:, others].contiguous(), wanted[:, others].contiguous(), "other heads")
            if not got[position:, 3].isnan().all():
                raise AssertionError("rows that read it are not NaN")


def fp8_checks():
    """Every check of bits."""
    edges = 1, 2, 63, 64, 65, 127, 129, 192, 255, 256, 257, 511, 513, 700, 768, 769, 1025
    return [
        Check("fp8 pages have the CPU's bytes", golden_bytes),
        Check("fp8 prefill", every_prefill, (SHAPES[0], KINDS, _WIDE)),
        Check("fp8 decode", every_decode, (SHAPES[0], KINDS, _SWAPPED)),
        *(
            Check(
                f"fp8 chunks, {shape}".replace("torch.", ""), chunks_of_every_size, (shape, KINDS)
            )
            for shape in SHAPES
        ),
        Check("fp8 pages beside warp-specialised prefill", warp_specialised_reference),
        Check("fp8 streamed", streamed, (SHAPES[0], 4, edges)),
        Check("fp8 streamed, one key head", streamed, (replace_heads(SHAPES[0], 16, 1), 1, edges)),
        Check("fp8 streamed, heads of 64", streamed, (SMALL, 2, edges)),
        Check("fp8 NaN and infinity", not_finite),
    ]


def replace_heads(shape, query_heads, key_heads):
    """The shape with other numbers of heads."""
    return (*shape[:2], query_heads, key_heads, *shape[4:])
