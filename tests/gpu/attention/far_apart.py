"""Sequences whose windows lie on pages far apart, in one step: the bits of each by itself.

Between the end of the short ones and the window of the long one lie pages that no row reads.
`python -m tests.gpu.attention.far_apart` runs these checks alone.
"""

import sys

import torch

from tests.gpu.attention.case import ALL_LONG, ALL_SHORT, DECODE, PAGE, PREFILL, Case
from tests.gpu.lib.checks import attempt, ended, same
from tests.gpu.lib.suite import Check
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

LENGTHS = (40, 2000, 700, 257, 513)
COUNTS = (1, 1, 1, 1, 1), (3, 16, 1, 8, 2), (40, 300, 1, 257, 17)
"""Rows of each sequence in the step: decodes, decodes with drafts, chunks and whole prompts."""
KINDS = {
    "plain": ((torch.bfloat16, 128, 8, 2), False),
    "sinks": ((torch.bfloat16, 64, 16, 2), True),
    "fp32": ((torch.float32, 64, 4, 2), False),
}
WINDOWS = (1, 128, 512)


def windows_far_apart(kind, window):
    """Every variant, on a pool that holds NaN past each sequence's end."""
    shape, with_sinks = KINDS[kind]
    sinks = torch.randn(shape[2], device="cuda") * 3 if with_sinks else None
    cases = [Case((*shape, window), n, seed=10 * n, sinks=sinks) for n in LENGTHS]
    needs = [-(-length // PAGE) for length in LENGTHS]
    pages, mappings = cases[0].pool(sum(needs) + 2), []
    for i, (data, need) in enumerate(zip(cases, needs, strict=True)):
        mappings.append(tuple(range(sum(needs[:i]), sum(needs[:i]) + need))[::-1])
        stored = make_batch((PagedSequence(0, data.length, 0, mappings[-1]),), "cuda")
        data.store(0, data.length, pages, stored)
    compared = 0
    for counts in COUNTS:
        for short, ways in _ways(shape, with_sinks):
            _compare(cases, pages, mappings, counts, short, ways)
            compared += len(counts)
    return f"{compared} equal"


def _ways(shape, with_sinks):
    """How rows are shared out, with each prefill or decode variant that the shape has."""
    for short in (16, ALL_LONG, ALL_SHORT):
        yield short, (None, None)
    if shape[0] == torch.float32:  # few of the variants below have room for it
        return
    warps_specialise = shape[1] == 128 and not with_sinks
    for variant in PREFILL:
        if warps_specialise or not variant.warp_specialised:
            yield ALL_LONG, (variant, None)
    for variant in DECODE:
        yield ALL_SHORT, (None, variant)


def _compare(cases, pages, mappings, counts, short, ways):
    """The last rows of each sequence in one step, against the same rows of the sequence alone."""
    sequences, row = [], 0
    for data, mapping, count in zip(cases, mappings, counts, strict=True):
        sequences.append(PagedSequence(row, count, data.length - count, mapping))
        row += count
    batch = make_batch(tuple(sequences), "cuda", short)
    q = torch.cat([data.q[-count:] for data, count in zip(cases, counts, strict=True)])
    found = cases[0].attend(q, pages, batch, *ways).split(list(counts))
    for data, rows, count in zip(cases, found, counts, strict=True):
        same(rows, data.reference[-count:], f"length {data.length}, {counts}, {short}, {ways}")


def far_apart_checks():
    """One check a kind of model and window."""
    return [
        Check(f"windows far apart, {kind}, window {window}", windows_far_apart, (kind, window))
        for kind in KINDS
        for window in WINDOWS
    ]


def main() -> int:
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for check in far_apart_checks():
        attempt(check.name, check.function, *check.arguments)
    return ended()


if __name__ == "__main__":
    sys.exit(main())
