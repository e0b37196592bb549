"""Times of the warp-specialised GEMM beside another kernel and cuBLAS.

    python -m scripts.gpu_times.kernels.warp_specialised

Microseconds of the product alone, in a graph with rotating weights, interleaved; a ratio is
cuBLAS's time (bf16 output) by ours: 1 is its speed. `other` is what `leaf_choice` takes where this
kernel cannot run. At a cut below the whole root the reader's work is not in the time: a cut is to
be held against the same cut.
"""

import sys
import time
from dataclasses import replace

import torch

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.gemm.warp_specialised import LEAVES, TILE, fitting, forms, processors, rank_roots
from tests.gpu.lib.checks import attempt, draw
from tpdet.kernels.cuda.cost.static import leaf_choice
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm.variants.variant import Operands
from tpdet.kernels.cuda.gemm.variants.warp_specialised_launch import run_gluon_fold
from tpdet.kernels.cuda.hardware import H200

ROWS = (512, 1024, 2048, 4096, 8192)

SHAPES = {"o": (4096, 512), "down": (4096, 1536)}  # name: N, K of a leaf

BUDGET = 30.0  # seconds of timing


def times_of(name, n, k, ranks, rank, m, order_name, deadline):
    """Print one case: cuBLAS, another kernel, every cut and stage count."""
    leaves, roots = LEAVES // ranks, rank_roots(order_name, ranks, rank)
    weights = [draw(leaves, n, k, seed=i) * 0.02 for i in range(6 if m <= 1024 else 2)]
    x = draw(m, leaves * k)
    flat = [w.view(n, -1) for w in weights]
    pairs = list(zip(weights, flat, strict=True))
    labels, runs = ["cuBLAS"], [lambda w: torch.nn.functional.linear(x, w[1])]
    sms = processors()
    other = replace(H200, capability=(10, 0))
    choice = leaf_choice(m, n, k, leaves, roots, float32=False, sms=sms, gpu=other)
    tile = choice.tile
    labels.append(f"other cut {choice.cut} {choice.kernel} {tile.rows}x{tile.columns}")
    runs.append(lambda w: leaf_gemm.leaf_sums(x, w[0], roots, choice))
    for cut, form, _ in forms(leaves, roots):
        y = torch.empty(form.roots, m, n, device="cuda")
        for stages in fitting(form) if cut == 2 or form.roots == len(roots) else ():
            tile = replace(TILE, stages=stages)
            labels.append(f"gluon cut {cut} s{stages}")
            runs.append(
                lambda w, y=y, form=form, tile=tile: run_gluon_fold(
                    Operands(x, w[0], None, y), form, tile, sms
                )
            )
    repeats = 3 if time.time() < deadline else 1
    peer, *taken = interleaved_medians(runs, pairs, repeats)
    each = " | ".join(
        f"{label} {t:.1f} ({peer / t:.2f})" for label, t in zip(labels[1:], taken, strict=True)
    )
    print(
        f"{name:4s} {order_name} TP {ranks} rank {rank} M={m:4d} cuBLAS {peer:.1f} us "
        f"{2e-6 * m * n * k * leaves / peer:.0f} TFLOP/s | {each}",
        flush=True,
    )


def print_times():
    """Print all cases."""
    deadline = time.time() + BUDGET
    for name, (n, k) in SHAPES.items():
        for m in ROWS:
            for ranks in (1, 2, 4):
                attempt(
                    f"times {name}/{ranks} M={m}",
                    times_of,
                    name,
                    n,
                    k,
                    ranks,
                    0,
                    m,
                    "pairs",
                    deadline,
                )
        attempt(f"times {name}/2 rank 1", times_of, name, n, k, 2, 1, 4096, "pairs", deadline)
        for other in ("sequential", "tree"):
            for m in (512, 8192):
                attempt(f"times {name} {other}", times_of, name, n, k, 1, 0, m, other, deadline)


def main(arguments):
    """Print all times."""
    return run_parts("kernels.warp_specialised", {"times": print_times}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
