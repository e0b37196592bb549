"""Times of attention on a GPU beside scaled_dot_product_attention and the floor.

python -m scripts.gpu_times.kernels.attention
"""

import random
import sys

import torch
import torch.nn.functional as F

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.attention.case import DECODE, PAGE, PREFILL, draw, shuffled
from tests.gpu.lib.checks import attempt
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.attention.variants import (
    AttentionVariant,
    decode_variant,
    prefill_variant,
)
from tpdet.kernels.cuda.hardware import gpu_of
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

FAST_PREFILL = [  # of any head
    AttentionVariant(64, 4, 2),
    AttentionVariant(64, 4, 2, True),
    AttentionVariant(64, 4, 3, True),
    AttentionVariant(64, 8, 2, True),
    AttentionVariant(128, 8, 3),
    AttentionVariant(128, 8, 2, True),
    AttentionVariant(128, 8, 3, True),
]
BANDWIDTH, PEAK = 4.5e12, 989e12  # measured read bandwidth and data-sheet bf16 FLOP/s of an H200


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
    """The table's variant and others beside scaled_dot_product_attention, interleaved."""
    q = draw(length, 32, head, dtype=torch.bfloat16)
    pages = [draw(length // PAGE, 8, PAGE, head, dtype=torch.bfloat16, seed=s) for s in (1, 2)]
    batch = make_batch((PagedSequence(0, length, 0, shuffled(length, spare=0)),), "cuda")
    peer = [draw(1, 32, length, head, dtype=torch.bfloat16, seed=s) for s in (0, 1, 2)]
    runs = [lambda _: F.scaled_dot_product_attention(*peer, is_causal=True)]
    chosen = prefill_variant(q.dtype, head, gpu_of(q.device))
    variants = list(dict.fromkeys([chosen, *FAST_PREFILL]))
    runs += [
        lambda _, v=v: attention.attend(q, *pages, batch, None, v, DECODE[0]) for v in variants
    ]
    work = 4 * length * length / 2 * head * 32
    lines = [f"floor {work / PEAK * 1e6:.0f} us"]
    names = ["scaled_dot_product_attention", *(str(v) for v in variants)]
    for name, took in zip(names, interleaved_medians(runs, [0, 0, 0]), strict=True):
        lines.append(f"{name}: {took:.0f} us, {work / took / 1e6:.0f} TFLOP/s")
    return "\n    ".join(lines)


def print_times():
    """One at a time."""
    variants = [
        AttentionVariant(16, w, s) for w, s in ((1, 3), (2, 3), (4, 3), (1, 2), (2, 2), (2, 4))
    ]
    for size, context in ((1, 8192), (16, 8192), (64, 2048), (1, 32768)):
        chosen = decode_variant(torch.bfloat16, 128, 4, size * context // PAGE, size, streams=True)
        for v in (chosen, *variants):
            name = f"decode batch {size} context {context}: {v}"
            attempt(name, decode_speed, size, context, v)
    for length, head in ((4096, 128), (16384, 128), (4096, 64), (4096, 256)):
        attempt(f"prefill {length} head {head}", prefill_speed, length, head)


def main(arguments):
    """Print all times."""
    return run_parts("kernels.attention", {"times": print_times}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
