"""Times of decode attention and of the rotation that stores, in CUDA graphs, one line a case.

python -m scripts.gpu_times.kernels.decode
"""

import random
import sys

import torch

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.attention.decode import PAGE, PREFILL, SHARES, STREAMED, VARIANTS, rotation, three_of
from tests.gpu.lib.checks import attempt, draw
from tests.lib.kernels.decode_reference import attend_reference
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.attention.variants import decode_variant
from tpdet.kernels.cuda.pointwise.rotate_and_store import rotate_and_store_as, share
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

BANDWIDTH = 4.5e12

CACHE = 256 << 20

TIMED = [
    (1, 128), (16, 128), (64, 128), (256, 128), (256, 224), (256, 600), (1, 8192), (16, 8192),
    (64, 2048), (1, 32768), (1, 131072),
]  # fmt: skip


def rotation_times(rows):
    """A line of microseconds of so many rows, by share of heads."""
    made = [rotation(rows, seed=s) for s in range(2 if rows > 256 else 4)]
    made = [(*item, [table[item[4].positions] for table in item[1]]) for item in made]
    old = lambda x: three_of(*x[0], x[5], x[2], x[3], x[4])
    runs = [old]
    for how in SHARES:
        runs.append(lambda x, how=how: rotate_and_store_as(*x[0], x[1], x[2], 1e-6, *x[3:5], how))
    took = interleaved_medians(runs, made * 8)
    floor = rows * 48 * 128 * 2 * 2 / 4.3e12 * 1e6
    said = ", ".join(f"{h.heads}x{h.warps} {t:.2f}" for h, t in zip(SHARES, took[1:], strict=True))
    return f"us: floor {floor:.2f}, three kernels {took[0]:.2f}; {said}; table {share(rows)}"


def decode_times(size, context):
    """Lines of microseconds of a step, quickest variant first."""
    each = -(-context // PAGE)
    held = 2 * size * context * 8 * 128 * 2
    copies = min(160, max(2, -(-CACHE // held)))
    pool = [draw(copies * size * each, 8, PAGE, 128, seed=s) for s in (1, 2)]
    order = random.Random(0).sample(range(copies * size * each), copies * size * each)
    q, batches = draw(size, 32, 128), []
    for _ in range(copies):
        spans = [tuple(order.pop() for _ in range(each)) for _ in range(size)]
        rows = tuple(PagedSequence(i, 1, context - 1, span) for i, span in enumerate(spans))
        batches.append(make_batch(rows, "cuda"))
    peer = lambda b: attend_reference(q, *pool, b, None, warps=2, stages=3)
    runs = [peer]
    variants = [*VARIANTS, STREAMED[0]]
    for variant in variants:
        runs.append(lambda b, v=variant: attention.attend(q, *pool, b, None, PREFILL, v))
    took = interleaved_medians(runs, batches, 5)
    chosen = decode_variant(torch.bfloat16, 128, 4, size * each, size, streams=True)
    floor = held / BANDWIDTH * 1e6
    lines = [f"floor {floor:.1f} us, first form {took[0]:.1f} ({took[0] / floor:.2f})"]
    for v, t in sorted(zip(variants, took[1:], strict=True), key=lambda pair: pair[1]):
        kind = f"{'swapped ' if v.swapped else ''}{'fused' if v.fused else 'two'}"
        kind = "streamed" if v.streamed else kind
        mark = " <- table" if v == chosen else ""
        lines.append(f"  {kind} {v.warps} warps {v.stages} stages: {t:.1f} ({t / floor:.2f}){mark}")
    return "\n      ".join(lines)


def print_times():
    """Print all cases."""
    for rows in (1, 16, 64, 256, 8192):
        attempt(f"rotation of {rows}", rotation_times, rows)
    for size, context in TIMED:
        attempt(f"batch {size} context {context}", decode_times, size, context)


def main(arguments):
    """Print all times."""
    return run_parts("kernels.decode", {"times": print_times}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
