"""Bits and accuracy of attention on a GPU: one check a function."""

import random

import torch

from tests.gpu.attention.case import (
    ALL_LONG,
    ALL_SHORT,
    DECODE,
    KINDS,
    PAGE,
    PREFILL,
    REFERENCE,
    SHAPES,
    Case,
    cut_into_chunks,
)
from tests.gpu.attention.far_apart import far_apart_checks
from tests.gpu.attention.lengths import every_length
from tests.gpu.attention.rotary_bits import rotary_bits, stored_bits
from tests.gpu.lib.checks import poisoned_workspaces, same
from tests.gpu.lib.suite import Check
from tpdet.kernels.cuda.attention.variants import AttentionVariant
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch


def every_variant(kind):
    data = Case(SHAPES[0], 1100, kind)
    for variant in PREFILL:
        same(data.whole(1100, variant, ALL_LONG), data.reference, f"prefill {variant}")
    for variant in DECODE:
        same(data.whole(1100, variant, ALL_SHORT), data.reference, f"splits {variant}")
    return {"variants": len(PREFILL) + len(DECODE)}


def every_shape(shape):
    """Every kind of data, whole and in chunks; then the error against fp64."""
    chance = random.Random(1)
    narrow = shape[0] == torch.float32
    prefill = (
        [AttentionVariant(16, 4, 1), AttentionVariant(32, 8, 1)] if narrow else [None, REFERENCE[0]]
    )
    for kind in KINDS:
        data = Case(shape, 700, kind)
        for variant in prefill:
            same(data.whole(700, variant, ALL_LONG), data.reference, f"{kind} {variant}")
        for length in (1, 64, 255, 257, 513, 700):
            cut_into_chunks(data, length, chance, prefill, [None])
    error = relative_error(Case(shape, 700))
    limit = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}[shape[0]]
    if error > limit:
        raise AssertionError(f"relative error {error:.2e} above {limit:.0e}")
    return {"value": error, "unit": "relative error", "limit": limit}


def sinks_enter_once(window):
    """Every kernel that takes sinks, whole, split and in chunks; gpt-oss's heads."""
    chance, sinks = random.Random(2), torch.randn(64, device="cuda") * 3
    data = Case((torch.bfloat16, 64, 64, 8, window), 700, sinks=sinks)
    prefill = [variant for variant in PREFILL if not variant.warp_specialised]
    for variant in prefill:
        same(data.whole(700, variant, ALL_LONG), data.reference, f"prefill {variant}")
    for variant in DECODE:
        same(data.whole(700, variant, ALL_SHORT), data.reference, f"splits {variant}")
    for length in (1, 257, 700):
        cut_into_chunks(data, length, chance, [None, *prefill], [None, *DECODE])
    error = relative_error(data)
    data.sinks = None
    if error > 5e-3 or torch.equal(data.whole(700, None, ALL_LONG), data.reference):
        raise AssertionError(f"relative error {error:.2e}, or sinks reach no bit")
    return {"value": error, "unit": "relative error", "limit": 5e-3}


def mixed_batch(shape):
    """Decodes, chunks and prompts together, on shuffled pages of one pool, with NaN pad rows."""
    chance = random.Random(3)
    spans = [(0, 1), (40, 41), (255, 256), (256, 257), (600, 601), (650, 653), (0, 300), (100, 400)]
    spans += [(0, 700), (511, 700), (690, 700), (699, 700)]
    cases = [Case(shape, end, seed=10 * i) for i, (_, end) in enumerate(spans)]
    need = [-(-end // PAGE) for _, end in spans]
    order = chance.sample(range(sum(need) + 5), sum(need))
    pages, sequences, row = cases[0].pool(sum(need) + 5), [], 0
    for data, (first, end), count in zip(cases, spans, need, strict=True):
        mapping = tuple(order.pop() for _ in range(count))
        early = make_batch((PagedSequence(0, first, 0, mapping),), "cuda")
        data.store(0, first, pages, early)
        sequences.append(PagedSequence(row, end - first, first, mapping))
        row += end - first
    pad = torch.full((3, *cases[0].q.shape[1:]), torch.nan, dtype=shape[0], device="cuda")
    parts = [data.q[first:end] for data, (first, end) in zip(cases, spans, strict=True)]
    q = torch.cat([*parts, pad])
    for short in (ALL_LONG, 16, ALL_SHORT):
        batch = make_batch(tuple(sequences), "cuda", short)
        for data, sequence, (first, end) in zip(cases, sequences, spans, strict=True):
            alone = PagedSequence(0, sequence.count, sequence.start, sequence.pages)
            data.store(first, end, pages, make_batch((alone,), "cuda"))
        out = cases[0].attend(q, pages, batch)
        for data, sequence, (first, end) in zip(cases, sequences, spans, strict=True):
            mine = out[sequence.first_row : sequence.first_row + sequence.count]
            same(mine, data.reference[first:end], f"{first}..{end}, short {short}")
        same(out[row:], torch.zeros_like(pad), "pad rows")


def heads_of_a_rank():
    """TP: a rank's key heads, whole or with a part of their query heads, give the same bits."""
    data = Case((torch.bfloat16, 128, 8, 2, None), 600)
    for query, key in ((slice(4, 8), 1), (slice(2, 4), 0), (slice(7, 8), 1)):
        for short in (ALL_LONG, ALL_SHORT):
            part = object.__new__(Case)
            part.__dict__ |= data.__dict__
            part.query_heads, part.key_heads = query.stop - query.start, 1
            part.q = data.q[:, query].contiguous()
            part.k = data.k[:, key : key + 1].contiguous()
            part.v = data.v[:, key : key + 1].contiguous()
            out = part.whole(600, None, short)
            same(out, data.reference[:, query], f"heads {query}, short {short}")


def zeros_are_positive():
    """Values of -1e-38 underflow to a zero whose sign would show without `+ 0.0`."""
    data = Case((torch.float32, 64, 4, 2, None), 300)
    data.v = torch.full_like(data.v, -1e-45)
    for short in (ALL_LONG, ALL_SHORT):
        out = data.whole(300, None, short)
        if bool((out.eq(0) & torch.signbit(out)).any()):
            raise AssertionError("a zero with a sign")
    if not bool(out.eq(0).any()):
        raise AssertionError("nothing underflowed: the case shows nothing")
    return "no -0.0"


def relative_error(data: Case) -> float:
    """Of the reference output, against attention in fp64."""
    q, k, v = (x.double().transpose(0, 1) for x in (data.q, data.k, data.v))
    k, v = (x.repeat_interleave(data.query_heads // data.key_heads, 0) for x in (k, v))
    at = torch.arange(data.length, device="cuda")
    seen = at[None, :] <= at[:, None]
    if data.window is not None:
        seen &= at[None, :] > at[:, None] - data.window
    score = (q @ k.transpose(1, 2)) / data.head**0.5
    score = score.masked_fill(~seen, -torch.inf)
    if data.sinks is not None:
        beside = data.sinks.double()[:, None, None].expand(-1, data.length, 1)
        score = torch.cat([score, beside], -1)
    exact = torch.softmax(score, -1)[..., : data.length] @ v
    exact = exact.transpose(0, 1)
    error: float = ((data.reference.double() - exact).norm() / exact.norm()).item()
    return error


def poison_changes_nothing(shape):
    """NaN in free pages (always), in outputs and workspaces, and around them; short and long."""
    data = Case(shape, 700)
    for short in (ALL_LONG, ALL_SHORT):
        with poisoned_workspaces():
            whole = data.whole(700, None, short)
        same(whole, data.reference, f"short {short}")


def attention_checks():
    """Every check, the longest first."""
    checks = []
    for shape in SHAPES:
        name = " ".join(str(part).removeprefix("torch.") for part in shape)
        checks.append(Check(f"shape {name}", every_shape, (shape,)))
    checks.sort(key=lambda check: "float32" not in check.name)
    for kind in KINDS:
        checks.append(Check(f"every length, random chunks, {kind}", every_length, (kind,)))
        checks.append(Check(f"every variant, {kind}", every_variant, (kind,)))
    for window in (None, 128):
        checks.append(Check(f"sinks, window {window}", sinks_enter_once, (window,)))
    for shape in (SHAPES[0], SHAPES[1]):
        checks.append(Check(f"mixed batch, window {shape[4]}", mixed_batch, (shape,)))
    checks += far_apart_checks()
    for shape in (SHAPES[0], SHAPES[2], SHAPES[6]):
        name = f"poison {shape[0]} head {shape[1]}".replace("torch.", "")
        checks.append(Check(name, poison_changes_nothing, (shape,)))
    checks.append(Check("heads of a rank", heads_of_a_rank))
    checks.append(Check("sign of zero", zeros_are_positive))
    checks.append(Check("rotate_heads", rotary_bits))
    checks.append(Check("store_kv, embed", stored_bits))
    return checks
