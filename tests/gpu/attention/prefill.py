"""Prefill attention's forms on an H200: bits against the first form."""

import torch

from tests.gpu.attention.case import ALL_LONG, KINDS, PAGE, Case, draw, shuffled
from tests.gpu.lib.checks import same
from tests.gpu.lib.suite import Check
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.attention.variants import AttentionVariant
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

FIRST = AttentionVariant(64, 4, 3, True)
WARP_SPECIALISED = {
    "warp-specialised, 3 stages": AttentionVariant(128, 4, 3, True, warp_specialised=True),
    "warp-specialised, 4 stages": AttentionVariant(128, 4, 4, True, warp_specialised=True),
    "warp-specialised, 5 stages": AttentionVariant(128, 4, 5, True, warp_specialised=True),
}
SHAPES = [  # dtype, head, query heads, key heads, window
    (torch.bfloat16, 128, 32, 8, None),
    (torch.bfloat16, 128, 6, 2, 77),
    (torch.float16, 128, 7, 1, 300),
]
LENGTHS = (1, 17, 63, 64, 65, 255, 256, 257, 320, 511, 513, 800, 1100)
CUTS = ((0, 1), (1, 64), (64, 193), (193, 256), (256, 700), (700, 831), (831, 1100))


def same_bits_as_first(variant):
    """Shapes, lengths, chunks and kinds of data: against the first form on each."""
    count = 0
    for shape in SHAPES:
        for kind in KINDS:
            data = Case(shape, 1100, kind)
            for length in LENGTHS if kind == "normal" else (257, 1100):
                got = data.whole(length, variant, ALL_LONG)
                same(got, data.whole(length, FIRST, ALL_LONG), f"{shape} {kind} {length}")
                same(got, data.reference[:length], f"{shape} {kind} {length}, reference")
                count += 1
            chunked(data, variant)
    return {"cases": count}


def chunked(data, variant):
    """Chunks, each stored and attended in turn, the keys behind it NaN."""
    mapping = shuffled(data.length, 7)
    pages = data.pool(len(mapping) + 2)
    for first, end in CUTS:
        batch = make_batch((PagedSequence(0, end - first, first, mapping),), "cuda", ALL_LONG)
        data.store(first, end, pages, batch)
        part = data.attend(data.q[first:end], pages, batch, variant, AttentionVariant(16, 4, 2))
        same(part, data.reference[first:end], f"chunk {first} to {end}")


def same_bits_again_and_again(variant, repeats=40):
    """Two sequences of 4,096 among other programs, often: what a race would change."""
    step = Step(2, 4096, 128, copies=1)
    wanted = step.attend(0, FIRST)
    for repeat in range(repeats):
        same(step.attend(0, variant), wanted, f"repeat {repeat}")
    return {"repeats": repeats}


class Step:
    """Equal prompts of whole pages in one step, and pages to rotate over."""

    def __init__(self, prompts, length, head, copies):
        self.prompts, self.length, self.head = prompts, length, head
        count, each = prompts * length // PAGE, length // PAGE
        self.q = draw(prompts * length, 32, head, dtype=torch.bfloat16)
        shape = (count, 8, PAGE, head)
        self.pools = [
            [draw(*shape, dtype=torch.bfloat16, seed=2 * copy + s) for s in (1, 2)]
            for copy in range(copies)
        ]
        order = shuffled(prompts * length, spare=0)
        self.batch = make_batch(
            tuple(
                PagedSequence(i * length, length, 0, order[i * each : (i + 1) * each])
                for i in range(prompts)
            ),
            "cuda",
        )

    def attend(self, copy, variant):
        pool = self.pools[copy]
        return attention.attend(
            self.q, *pool, self.batch, None, variant, AttentionVariant(16, 4, 2)
        )


def prefill_checks():
    """Every form's bits, once and again and again."""
    checks = [Check(name, same_bits_as_first, (v,)) for name, v in WARP_SPECIALISED.items()]
    for name, variant in WARP_SPECIALISED.items():
        checks.append(Check(f"again and again, {name}", same_bits_again_and_again, (variant,)))
    return checks
