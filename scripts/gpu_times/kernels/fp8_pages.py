"""Times of attention and of the rotation that stores over pages in fp8, beside bf16.

python -m scripts.gpu_times.kernels.fp8_pages
"""

import random
import sys

import torch

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.attention.case import draw
from tests.gpu.attention.decode import rotation
from tests.gpu.attention.fp8_pages import FEW, MANY, fp8_pool
from tests.gpu.lib.checks import attempt
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.attention.variants import AttentionVariant
from tpdet.kernels.cuda.pointwise.rotate_and_store import rotate_and_store_as, share
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

TIMED = (1, 128), (16, 128), (64, 128), (256, 128), (256, 600), (64, 2048), (1, 32768)


def pools(pages):
    """Pages of 8 key heads of 128 in bf16 and in fp8: of numbers around 1."""
    numbers = [draw(pages, 8, 256, 128, dtype=torch.bfloat16, seed=s) for s in (1, 2)]
    stored = fp8_pool(pages, 8, 128)
    for page in stored:
        page.random_(0, 256)
        page[..., -256:] = 118 + page[..., -256:] % 4
        page[..., :-256] &= 0xF7  # no NaN code
    return numbers, stored


def decode_times(size, context):
    """Microseconds of a layer's attention in bf16, as chosen, and of each form over fp8 pages."""
    each = -(-context // 256)
    copies = min(64, max(2, -(-(256 << 20) // (2 * size * context * 8 * 128))))
    numbers, stored = pools(copies * size * each)
    order = random.Random(0).sample(range(copies * size * each), copies * size * each)
    q, batches = draw(size, 32, 128, dtype=torch.bfloat16), []
    for _ in range(copies):
        spans = [tuple(order.pop() for _ in range(each)) for _ in range(size)]
        rows = tuple(PagedSequence(i, 1, context - 1, span) for i, span in enumerate(spans))
        batches.append(make_batch(rows, "cuda"))
    fused = each <= 16
    forms = [AttentionVariant(16, 4, 1, fused=fused, swapped=True)]
    forms += [AttentionVariant(8, 4, s, swapped=True, streamed=True) for s in (4, 5, 6) if fused]
    runs = [lambda b: attention.paged_attention(q, *numbers, b)]
    runs.append(lambda b: attention.paged_attention(q, *stored, b))
    for form in forms:
        runs.append(lambda b, v=form: attention.attend(q, *stored, b, None, MANY, v))
    took = interleaved_medians(runs, batches, 5)
    said = ", ".join(
        f"{'streamed' if v.streamed else 'split'} {v.stages} stages {t:.1f}"
        for v, t in zip(forms, took[2:], strict=True)
    )
    return f"us: bf16 {took[0]:.1f}, fp8 {took[1]:.1f} ({took[1] / took[0]:.2f}); {said}"


def prefill_times(count, length):
    """Microseconds of a layer's attention of prompts, in bf16 and over fp8 pages."""
    each = length // 256
    numbers, stored = pools(count * each)
    rows = [
        PagedSequence(i * length, length, 0, tuple(range(i * each, (i + 1) * each)))
        for i in range(count)
    ]
    q, batch = draw(count * length, 32, 128, dtype=torch.bfloat16), make_batch(tuple(rows), "cuda")
    forms = [
        AttentionVariant(r, w, s) for r, w, s in ((64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 8, 2))
    ]
    runs = [lambda b: attention.paged_attention(q, *numbers, b)]
    for form in forms:
        runs.append(lambda b, v=form: attention.attend(q, *stored, b, None, v, FEW))
    took = interleaved_medians(runs, [batch] * 2, 3)
    said = ", ".join(
        f"{v.rows} rows {v.stages} stages {t:.0f}" for v, t in zip(forms, took[1:], strict=True)
    )
    return f"us: bf16 {took[0]:.0f}; fp8 {said}"


def store_times(rows):
    """Microseconds of the rotation that stores, into pages of bf16 and of fp8."""
    made = [rotation(rows, seed=seed) for seed in range(4)]
    made = [(*item, fp8_pool(len(item[3][0]), 8, 128)) for item in made]
    how = share(rows)
    runs = [
        lambda x: rotate_and_store_as(*x[0], x[1], x[2], 1e-6, x[3], x[4], how),
        lambda x: rotate_and_store_as(*x[0], x[1], x[2], 1e-6, x[5], x[4], how),
    ]
    plain, fp8 = interleaved_medians(runs, made * 8)
    return f"us: bf16 {plain:.2f}, fp8 {fp8:.2f}"


def print_times():
    """Print all cases."""
    for size, context in ((256, 600), *(case for case in TIMED if case != (256, 600))):
        attempt(f"batch {size} context {context}", decode_times, size, context)
    for rows in (1, 64, 256, 8192):
        attempt(f"rotation and store of {rows}", store_times, rows)
    attempt("8 prompts of 2,048", prefill_times, 8, 2048)


def main(arguments):
    """Print all times."""
    return run_parts("kernels.fp8_pages", {"times": print_times}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
