"""Attention, rotary embedding and stored keys on a GPU: equal bits first, then accuracy and speed.

`python -m tests.gpu.attention` runs every case, reports each failure and goes on; a table comes
last and the exit status is 1 when a case failed.
"""

import multiprocessing
import random
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F

from tests.gpu.checks import same
from tests.gpu.times import interleaved_medians
from tpdet.kernels.cpu import embedding as cpu_embedding
from tpdet.kernels.cpu import rotary as cpu_rotary
from tpdet.kernels.cuda import attention, embedding, rotary
from tpdet.kernels.cuda.attention import Variant
from tpdet.kernels.paged_batch import PagedSequence, make_batch

PAGE = 256
ALL_LONG, ALL_SHORT = 0, 1 << 20
_WORKERS = 10
REFERENCE = Variant(64, 4, 2), Variant(16, 4, 2)
PREFILL = [
    Variant(16, 1, 2),
    Variant(16, 4, 3),
    Variant(32, 2, 2),
    Variant(32, 4, 3),
    Variant(64, 4, 2),
    Variant(64, 4, 3, True),
    Variant(64, 8, 2),
    Variant(128, 4, 2),
    Variant(128, 8, 3),
    Variant(128, 8, 2, True),
]
DECODE = [
    Variant(16, 1, 3),
    Variant(16, 2, 3),
    Variant(16, 4, 2),
    Variant(32, 4, 2),
    Variant(64, 4, 2),
    Variant(128, 8, 2),
]
FAST_PREFILL = [
    Variant(64, 4, 2),
    Variant(64, 4, 2, True),
    Variant(64, 4, 3, True),
    Variant(64, 8, 2, True),
    Variant(128, 8, 3),
    Variant(128, 8, 2, True),
    Variant(128, 8, 3, True),
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
BANDWIDTH, PEAK = 4.5e12, 989e12  # measured read bandwidth and data-sheet bf16 FLOP/s of an H200


def case(name, function, *args) -> tuple[str, str]:
    """Run one case: its name and what it said; a failure is printed and said."""
    begin = time.perf_counter()
    try:
        said = function(*args) or "equal"
        torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc(limit=4)
        said = f"FAILED {type(error).__name__}: {str(error)[:160]}"
    print(f"{name}: {said}  [{time.perf_counter() - begin:.1f} s]", flush=True)
    return name, said


def draw(*shape, dtype, kind="normal", seed=0):
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

    def __init__(self, shape, length, kind="normal", seed=0):
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
        embedding.store_kv(self.k[first:end], self.v[first:end], *pages, batch)

    def attend(self, q, pages, batch, prefill=None, decode=None):
        prefill = prefill or attention.prefill_variant(self.dtype, self.head, True)
        rows = batch.short_rows * self.query_heads // self.key_heads
        decode = decode or attention.decode_variant(self.dtype, self.head, rows)
        return attention.attend(q, *pages, batch, self.window, prefill, decode)

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


def every_variant(kind):
    data = Case(SHAPES[0], 1100, kind)
    for variant in PREFILL:
        same(data.whole(1100, variant, ALL_LONG), data.reference, f"prefill {variant}")
    for variant in DECODE:
        same(data.whole(1100, variant, ALL_SHORT), data.reference, f"splits {variant}")


def every_length():
    data, chance = Case(SHAPES[0], 1100), random.Random(0)
    lengths = [
        *range(1, 301),
        *range(301, 1100, 17),
        511,
        512,
        513,
        767,
        768,
        769,
        1023,
        1024,
        1100,
    ]
    for length in lengths:
        variants, short = chance.choice(((PREFILL, ALL_LONG), (DECODE, ALL_SHORT)))
        whole = data.whole(length, chance.choice(variants), short)
        same(whole, data.reference[:length], f"length {length}")
        cut_into_chunks(data, length, chance, PREFILL, DECODE)
    return f"equal at {len(lengths)} lengths"


def every_shape(shape, kind):
    data, chance = Case(shape, 700, kind), random.Random(1)
    narrow = shape[0] == torch.float32
    prefill = [Variant(16, 4, 1), Variant(32, 8, 1)] if narrow else [None, REFERENCE[0]]
    for variant in prefill:
        same(data.whole(700, variant, ALL_LONG), data.reference, f"{variant}")
    for length in (1, 64, 255, 257, 513, 700):
        cut_into_chunks(data, length, chance, prefill, [None])
    error = relative_error(Case(shape, 700))
    limit = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}[shape[0]]
    if error > limit:
        raise AssertionError(f"relative error {error:.2e} above {limit:.0e}")
    return f"equal, {kind}; relative error {error:.2e}"


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
    exact = torch.softmax(score.masked_fill(~seen, -torch.inf), -1) @ v
    exact = exact.transpose(0, 1)
    error: float = ((data.reference.double() - exact).norm() / exact.norm()).item()
    return error


def rotary_bits():
    count = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head in (64, 96, 128, 256):
            for kind in ("normal", "heavy", "tiny"):
                wide = draw(37, 7 * head + 16, dtype=dtype, kind=kind, seed=head)
                x = wide[:, : 7 * head].view(37, 7, head)
                x[3, 2] = 0
                if dtype != torch.float16:
                    x[4] *= 1e-38
                    x[5, :, 0] = 1e30
                angle = draw(37, head // 2, dtype=torch.float32, seed=5)
                cos, sin = angle.cos(), angle.sin()
                for weight in (None, draw(head, dtype=dtype, seed=6)):
                    ours = rotary.rotate_heads(x, cos, sin, weight, 1e-6)
                    host = None if weight is None else weight.cpu()
                    theirs = cpu_rotary.rotate_heads(x.cpu(), cos.cpu(), sin.cpu(), host, 1e-6)
                    same(ours.cpu(), theirs, f"{dtype} {head} {kind} {host is not None}")
                    one = rotary.rotate_heads(x[:, 4:5].contiguous(), cos, sin, weight, 1e-6)
                    same(one, ours[:, 4:5], "one head")
                    count += 1
    return f"{count} cases equal to the CPU's bits"


def stored_bits():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for heads, head in ((8, 128), (3, 96), (1, 256)):
            k, v = (draw(900, heads, head, dtype=dtype, kind="heavy", seed=s) for s in (1, 2))
            sequences = (
                PagedSequence(0, 600, 100, (7, 2, 5)),
                PagedSequence(600, 1, 255, (3,)),
                PagedSequence(601, 1, 256, (0, 6)),
                PagedSequence(602, 290, 3, (1, 4)),
            )
            shape = (9, heads, PAGE, head)
            ours = [torch.full(shape, torch.nan, dtype=dtype, device="cuda") for _ in "kv"]
            theirs = [x.cpu() for x in ours]
            embedding.store_kv(k, v, *ours, make_batch(sequences, "cuda"))
            cpu_embedding.store_kv(k.cpu(), v.cpu(), *theirs, make_batch(sequences))
            for left, right in zip(ours, theirs, strict=True):
                same(left.cpu(), right, f"{dtype} {heads}x{head}")
    ids = torch.randint(0, 999, (77,), device="cuda")
    table = draw(999, 96, dtype=torch.bfloat16)
    same(embedding.embed(ids, table).cpu(), table.cpu()[ids.cpu()], "embed")


def decode_speed(batch_size, context, variant):
    """GB/s of key and value bytes; pools together exceed the L2 cache."""
    pages_each = context // PAGE
    total = batch_size * pages_each
    size = 2 * total * 8 * PAGE * 128 * 2
    copies = max(2, -(-(256 << 20) // size))
    q = draw(batch_size, 32, 128, dtype=torch.bfloat16)
    shape = (total, 8, PAGE, 128)
    pools = [[draw(*shape, dtype=torch.bfloat16) for _ in "kv"] for _ in range(copies)]
    order = random.Random(0).sample(range(total), total)
    batch = make_batch(
        tuple(
            PagedSequence(i, 1, context - 1, tuple(order[i * pages_each : (i + 1) * pages_each]))
            for i in range(batch_size)
        ),
        "cuda",
    )
    call = lambda pool: attention.attend(q, *pool, batch, None, PREFILL[0], variant)
    took = interleaved_medians([call], pools)[0]
    return f"{took:.1f} us, {size / took / 1e3:.0f} GB/s (floor {size / BANDWIDTH * 1e6:.1f} us)"


def prefill_speed(length, head):
    """Every variant beside scaled_dot_product_attention, interleaved."""
    q = draw(length, 32, head, dtype=torch.bfloat16)
    pages = [draw(length // PAGE, 8, PAGE, head, dtype=torch.bfloat16, seed=s) for s in (1, 2)]
    batch = make_batch((PagedSequence(0, length, 0, shuffled(length, spare=0)),), "cuda")
    peer = [draw(1, 32, length, head, dtype=torch.bfloat16, seed=s) for s in (0, 1, 2)]
    runs = [lambda _: F.scaled_dot_product_attention(*peer, is_causal=True)]
    runs += [
        lambda _, v=v: attention.attend(q, *pages, batch, None, v, DECODE[0]) for v in FAST_PREFILL
    ]
    work = 4 * length * length / 2 * head * 32
    lines = [f"floor {work / PEAK * 1e6:.0f} us"]
    names = ["scaled_dot_product_attention", *(str(v) for v in FAST_PREFILL)]
    for name, took in zip(names, interleaved_medians(runs, [0, 0, 0]), strict=True):
        lines.append(f"{name}: {took:.0f} us, {work / took / 1e6:.0f} TFLOP/s")
    return "\n    ".join(lines)


def bit_cases():
    """(name, function, arguments) of every case, the longest first."""
    cases = [("every length, random chunks", every_length)]
    for kind in ("normal", "heavy", "cancelling", "tiny"):
        cases.append((f"every variant, {kind}", every_variant, kind))
    for index, shape in enumerate(SHAPES):
        name = " ".join(str(part).removeprefix("torch.") for part in shape)
        kind = ("normal", "heavy", "cancelling")[index % 3]
        cases.append((f"shape {name}", every_shape, shape, kind))
    for shape in (SHAPES[0], SHAPES[1]):
        cases.append((f"mixed batch, window {shape[4]}", mixed_batch, shape))
    cases.append(("heads of a rank", heads_of_a_rank))
    cases.append(("sign of zero", zeros_are_positive))
    cases.append(("rotate_heads", rotary_bits))
    cases.append(("store_kv, embed", stored_bits))
    return cases


def check_bits() -> list[tuple[str, str]]:
    """Cases side by side, each in a process of its own: compiling takes most of the time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_WORKERS, context, max_tasks_per_child=1) as pool:
        futures = [(given[0], pool.submit(case, *given)) for given in bit_cases()]
        results = []
        for name, future in futures:
            try:
                results.append(future.result(timeout=240))
            except Exception as error:
                results.append((name, f"FAILED {type(error).__name__}: {error}"))
    return results


def measure() -> list[tuple[str, str]]:
    """Times, one at a time."""
    results = []
    variants = [Variant(16, w, s) for w, s in ((1, 3), (2, 3), (4, 3), (1, 2), (2, 2), (2, 4))]
    for size, context in ((1, 8192), (16, 8192), (64, 2048), (1, 32768)):
        for v in variants:
            name = f"decode batch {size} context {context}: {v.warps} warps, {v.stages} stages"
            results.append(case(name, decode_speed, size, context, v))
    for length, head in ((4096, 128), (16384, 128), (4096, 64), (4096, 256)):
        results.append(case(f"prefill {length} head {head}", prefill_speed, length, head))
    return results


def main() -> int:
    begin = time.perf_counter()
    results = check_bits()
    print(f"bits: {time.perf_counter() - begin:.0f} s", flush=True)
    results += measure()
    width = max(len(name) for name, _ in results)
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, said in results:
        print(f"{name:{width}}  {said}")
    failed = sum(said.startswith("FAILED") for _, said in results)
    print(f"{len(results) - failed} of {len(results)} cases, {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
