"""Decode attention and the rotation that stores, on a GPU: bits.

The checks hold every variant against the first two-kernel form and against prefill.
"""

import random

import torch

from tests.gpu.lib.checks import draw, same
from tests.gpu.lib.suite import Check
from tests.lib.kernels.decode_reference import attend_reference
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.attention.decode_launch import arrival_counters
from tpdet.kernels.cuda.attention.variants import AttentionVariant, decode_variant
from tpdet.kernels.cuda.pointwise import embedding, rotary
from tpdet.kernels.cuda.pointwise.rotate_and_store import HeadShare, rotate_and_store_as
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

PAGE = 256
WIDE = [
    AttentionVariant(16, 4, stages, fused=fused, swapped=True)
    for stages in (1, 2, 3)
    for fused in (True, False)
]
NARROW = [AttentionVariant(16, w, s, fused=True) for w, s in ((2, 3), (4, 1))]
STREAMED = [AttentionVariant(rows, 4, 3, swapped=True, streamed=True) for rows in (8, 16)]
VARIANTS = [*WIDE, *NARROW]
PREFILL = AttentionVariant(64, 4, 2)
SHARES = [HeadShare(1, 1), HeadShare(2, 1), HeadShare(4, 1), HeadShare(8, 2), HeadShare(16, 4)]


def stored(lengths, heads=(32, 8), head=128, dtype=torch.bfloat16, kind="normal", seed=0):
    """q of every position, pages (NaN past each length) and page numbers of each sequence."""
    need = [-(-length // PAGE) for length in lengths]
    numbers = random.Random(seed).sample(range(sum(need) + 3), sum(need))
    shape = (sum(need) + 3, heads[1], PAGE, head)
    pages = [torch.full(shape, torch.nan, dtype=dtype, device="cuda") for _ in "kv"]
    queries, mappings = [], []
    for i, (length, count) in enumerate(zip(lengths, need, strict=True)):
        q = draw(length, heads[0], head, dtype=dtype, kind=kind, seed=seed + 3 * i)
        k, v = (
            draw(length, heads[1], head, dtype=dtype, kind=kind, seed=seed + 3 * i + s)
            for s in (1, 2)
        )
        queries.append(q.clamp(-1e4, 1e4))
        mappings.append(tuple(numbers.pop() for _ in range(count)))
        batch = make_batch((PagedSequence(0, length, 0, mappings[-1]),), "cuda")
        embedding.store_kv(k.clamp(-1e4, 1e4), v.clamp(-1e4, 1e4), *pages, batch)
    return queries, pages, mappings


def attend(q, pages, batch, variant, window=None):
    out = attention.attend(q, *pages, batch, window, PREFILL, variant)
    if arrival_counters(1, q.device).any():
        raise AssertionError(f"{variant}: arrivals are left over")
    return out


def every_length(kind, variants, window=None):
    chance, count = random.Random(kind), 0
    (q,), pages, (mapping,) = stored([1100], kind=kind)
    whole = make_batch((PagedSequence(0, 1100, 0, mapping),), "cuda", 0)
    prefill = attention.attend(q, *pages, whole, window, PREFILL, PREFILL)
    sampled = [1, 64, 65, 255, 256, 257, 512, 513, 768, 1024, 1100]
    for length in sampled + chance.sample(range(2, 1100), 25):
        rows = min(length, chance.choice((1, 1, 16)))
        first = length - rows
        batch = make_batch((PagedSequence(0, rows, first, mapping),), "cuda")
        part = q[first:length]
        wanted = attend_reference(part, *pages, batch, window)
        same(wanted, prefill[first:length], f"reference at {length}")
        for variant in variants:
            same(attend(part, pages, batch, variant, window), wanted, f"{length} {rows} {variant}")
            count += 1
    return f"{count} equal"


def every_shape():
    shapes = [(torch.bfloat16, 256, 4, 2), (torch.float16, 96, 8, 8), (torch.bfloat16, 64, 14, 2),
              (torch.float32, 64, 4, 2)]  # fmt: skip
    for dtype, head, heads, keys in shapes:
        (q,), pages, (mapping,) = stored([700], (heads, keys), head, dtype, "heavy")
        for rows, first, window in ((1, 699, None), (16, 500, None), (7, 650, 300), (1, 40, 77)):
            batch = make_batch((PagedSequence(0, rows, first, mapping),), "cuda")
            part = q[first : first + rows]
            wanted = attend_reference(part, *pages, batch, window)
            for splits in (1, 1000):
                variant = decode_variant(dtype, head, rows * heads // keys, splits)
                got = attend(part, pages, batch, variant, window)
                same(got, wanted, f"{dtype} {head} {rows} {variant}")


def rows_with_drafts(window):
    """Rows of 2 to 16 positions at every end around a page's: the bits of single rows.

    Keys of wrong drafts lay where the rows' are stored, and lie behind them.
    """
    (q,), pages, (mapping,) = stored([530])
    right = [page.clone() for page in pages]
    place = lambda start, count: make_batch((PagedSequence(0, count, start, mapping),), "cuda")
    singles = {
        at: attend(q[at : at + 1], right, place(at, 1), VARIANTS[0], window)
        for at in range(234, 516)
    }
    count = 0
    for end in (*range(250, 261), *range(506, 517)):
        for rows in (2, 4, 8, 16):
            start = end - rows
            batch, numbers = place(start, rows), torch.tensor(mapping, device="cuda")
            for page, whole in zip(pages, right, strict=True):
                page.copy_(whole)
                wrong = torch.arange(start + 1, min(end + 3, 530), device="cuda")
                page[numbers[wrong // PAGE], :, wrong % PAGE] = 3.0
                mine = torch.arange(start, end, device="cuda")
                at = numbers[mine // PAGE], slice(None), mine % PAGE
                page[at] = whole[at]
            wanted = torch.cat([singles[at] for at in range(start, end)])
            tuned = [
                decode_variant(torch.bfloat16, 128, 4 * rows, splits, sequences)
                for splits, sequences in ((4, 1), (64, 1), (64, 16), (64, 64), (256, 64))
            ]
            for variant in dict.fromkeys((*tuned, *(VARIANTS if end % 5 == 1 else ()))):
                got = attend(q[start:end], pages, batch, variant, window)
                same(got, wanted, f"end {end}, {rows} rows, {variant}")
                count += 1
    return f"{count} equal"


def replayed(variant):
    """A graph of 24 sequences of many lengths, replayed 100 times; ragged arrivals every time."""
    lengths = [random.Random(i).choice((1, 40, 256, 700, 1500, 5000)) for i in range(24)]
    queries, pages, mappings = stored(lengths, kind="heavy")
    ends = enumerate(zip(lengths, mappings, strict=True))
    batch = make_batch(tuple(PagedSequence(i, 1, n - 1, m) for i, (n, m) in ends), "cuda")
    q = torch.cat([x[-1:] for x in queries])
    wanted = attend_reference(q, *pages, batch, None)
    attend(q, pages, batch, variant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.attend(q, *pages, batch, None, PREFILL, variant)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        out.fill_(torch.nan)
        graph.replay()
        wrong += (out.view(torch.int16) != wanted.view(torch.int16)).sum()
    same(out, wanted, f"{variant}")
    if int(wrong):
        raise AssertionError(f"{variant}: {int(wrong)} values differed over 100 replays")


def rotation(rows, heads=(32, 8), head=128, dtype=torch.bfloat16, seed=0):
    """q, k, v as parts of one product, tables, norms, pages and the batch of `rows` rows."""
    wide = draw(rows, (heads[0] + 2 * heads[1]) * head, dtype=dtype, kind="heavy", seed=seed)
    parts = wide.split([heads[0] * head, heads[1] * head, heads[1] * head], 1)
    tables = [draw(4096, head // 2, dtype=torch.float32, seed=s) for s in (1, 2)]
    norms = [draw(head, dtype=dtype, seed=s) for s in (3, 4)]
    if rows > 256:
        each = rows // 4
        spans = [(i * each, each, 17 * i) for i in range(4)]
    else:
        spans = [(i, 1, 128 + i) for i in range(rows)]
    sequences, page = [], 0
    for first, count, start in spans:
        need = -(-(start + count) // PAGE)
        sequences.append(PagedSequence(first, count, start, tuple(range(page, page + need))))
        page += need
    pages = [torch.full((page, heads[1], PAGE, head), 3.0, dtype=dtype, device="cuda") for _ in "k"]
    pages.append(pages[0].clone())
    qkv = [x.view(rows, -1, head) for x in parts]
    return qkv, tables, norms, pages, make_batch(tuple(sequences), "cuda")


def three(qkv, tables, norms, pages, batch):
    q, k, v = qkv
    angles = [table[batch.positions] for table in tables]
    return three_of(q, k, v, angles, norms, pages, batch)


def three_of(q, k, v, angles, norms, pages, batch):
    out = rotary.rotate_heads(q, *angles, norms[0], 1e-6)
    embedding.store_kv(rotary.rotate_heads(k, *angles, norms[1], 1e-6), v, *pages, batch)
    return out


def rotation_bits():
    shapes = [(torch.bfloat16, 128, (32, 8)), (torch.float16, 96, (5, 2)),
              (torch.float32, 64, (7, 1)), (torch.bfloat16, 256, (4, 2))]  # fmt: skip
    for dtype, head, heads in shapes:
        for rows in (1, 37, 1024):
            qkv, tables, norms, pages, batch = rotation(rows, heads, head, dtype)
            for weights in (norms, (None, None)):
                theirs = [page.clone() for page in pages]
                wanted = three(qkv, tables, weights, theirs, batch)
                for how in SHARES:
                    ours = [page.clone() for page in pages]
                    got = rotate_and_store_as(*qkv, tables, weights, 1e-6, ours, batch, how)
                    same(got, wanted, f"{dtype} {head} {rows} {how}")
                    for left, right in zip(ours, theirs, strict=True):
                        same(left, right, f"pages {dtype} {head} {rows} {how}")


def decode_checks():
    """Every check of bits."""
    window = "heavy", [WIDE[0], WIDE[3], NARROW[0]], 300
    return [
        *(
            Check(f"every length, {kind}", every_length, (kind, VARIANTS))
            for kind in ("normal", "heavy", "cancelling", "tiny")
        ),
        Check("every length, window", every_length, window),
        Check("every shape", every_shape),
        *(Check(f"rows with drafts, window {w}", rows_with_drafts, (w,)) for w in (None, 77, 300)),
        *(
            Check(f"100 replays, {variant}", replayed, (variant,))
            for variant in (*VARIANTS, *STREAMED)
        ),
        Check("rotation bits", rotation_bits),
    ]
