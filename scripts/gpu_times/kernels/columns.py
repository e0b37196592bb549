"""Times of column and gated products by this GPU's committed table, beside `linear`.

python -m scripts.gpu_times.kernels.columns
"""

import math
import sys
from functools import cache

import torch

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.gemm.columns import LIMITS, MODELS, RANKS
from tests.gpu.lib.checks import attempt, draw
from tpdet.kernels.cuda.gemm import admission
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm.gated import gated_gemm
from tpdet.tools.tune.column_operands import linear_and_activation
from tpdet.tools.tune.shapes import tuned_products

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

FLOOR_BYTES, FLOOR_FLOPS = 4.5e12, 0.79e15  # measured on an H200


@cache
def admitted(device):
    """What start-up admits of the committed table."""
    return admission.check(tuned_products(MODELS, RANKS), device, LIMITS).admitted


def times_of(product, ratios):
    """Print a product's times by rows; their ratios to `linear` are appended."""
    n, k, head = product.n, product.k, product.kind == "head"
    copies = max(1, int(150e6 // (n * k * 2)))
    weights = [draw(n, k) * 0.02]
    weights += [weights[0].clone() for _ in range(copies)]
    line = []
    for m in ROWS:
        if head and m > LIMITS["head"]:
            continue
        x = draw(m, k)
        mine = admitted(x.device)
        if product.kind == "gated":
            ours = lambda w, x=x, mine=mine: gated_gemm(x, w, admitted=mine)
            peer = lambda w, x=x: linear_and_activation(x, w)
        else:
            out = torch.float32 if head else torch.bfloat16
            ours = lambda w, x=x, mine=mine, out=out: gemm.column_gemm(x, w, None, out, None, mine)
            peer = lambda w, x=x: torch.nn.functional.linear(x, w)
        taken, theirs = interleaved_medians((ours, peer), weights, repeats=11)
        size = 2 * (n * k + m * k) + m * product.outputs * (4 if head else 2)
        flops = 2 * m * n * k
        floor = max(flops / FLOOR_FLOPS, size / FLOOR_BYTES) * 1e6
        choice = mine.choice(product.kind, x, n)
        library = "L" if choice is not None and choice.library and m == choice.bucket else ""
        ratios.append((taken / theirs, f"{product} M={m}"))
        line.append(f"{m}:{taken:.1f}us/{taken / floor:.2f}f/{taken / theirs:.2f}{library}")
    torch.cuda.empty_cache()
    print(f"{product!s:20s} {' '.join(line)}", flush=True)


def print_times():
    """Print all products' times, then means of ratios."""
    ratios = []
    for product in tuned_products(MODELS, RANKS):
        attempt(str(product), times_of, product, ratios)
    for title, found in (
        ("columns", [r for r in ratios if r[1].startswith("column")]),
        ("gated", [r for r in ratios if r[1].startswith("gated")]),
        ("heads", [r for r in ratios if r[1].startswith("head")]),
        ("all", ratios),
    ):
        mean = math.exp(sum(math.log(r) for r, _ in found) / len(found))
        worst = ", ".join(f"{r:.2f} {name}" for r, name in sorted(found, reverse=True)[:4])
        print(f"{title}: geometric mean {mean:.3f} of {len(found)}, worst {worst}", flush=True)


def main(arguments):
    """Print all times."""
    return run_parts("kernels.columns", {"times": print_times}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
