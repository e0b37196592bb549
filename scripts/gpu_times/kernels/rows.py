"""Times of row products with the kernel that folds and norms, beside an engine's without leaves.

    python -m scripts.gpu_times.kernels.rows [times] [norm]

`times`: every choice, best first, and the one that a start takes; `norm`: warps of fold_and_norm.
Microseconds of `leaf_sums` and `fold_and_norm` (at TP 2 and 4 of rank 0's roots, as if they were
all), in a graph with rotating weights, interleaved with `linear` and the same over its bf16 result.
"""

import math
import sys
import time
from functools import cache

import torch

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.gemm.rows import EPS, LEAVES, all_choices, compile_all, rank_roots, words
from tests.gpu.lib.checks import attempt, draw
from tpdet.kernels import order
from tpdet.kernels.cuda.cost.static import leaf_choice
from tpdet.kernels.cuda.gemm import admission
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.pointwise import finish, norm
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import PartialSums, whole_sum
from tpdet.tools.tune.shapes import tuned_row_products

ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)

SHAPES = {  # name: N, K, tensor-parallel sizes
    "o": (4096, 4096, (1, 2, 4)), "down": (4096, 12288, (1, 2, 4)),
    "70B o": (8192, 8192, (4,)), "70B down": (8192, 28672, (4,)),
}  # fmt: skip

BUDGET = 55.0  # seconds of timing


def with_norm(x, roots, choice, residual, weight):
    """A function of the weight: sums by a choice, then fold and norm."""

    def run(w):
        sums = leaf_gemm.leaf_sums(x, w, roots, choice)
        if len(sums.roots) > 1:  # a rank of several roots sends them; time one of them
            sums = PartialSums(sums.values, sums.roots[:1])
        return finish.fold_and_norm(sums, Finish(residual, Norm(weight, EPS)))

    return run


def without_leaves(x, n, residual, weight):
    """cuBLAS, then residual and norm of its bf16 product in one kernel."""

    def run(w):
        product = torch.nn.functional.linear(x, w.view(n, -1))
        return finish.fold_and_norm(whole_sum(product), Finish(residual, Norm(weight, EPS)))

    return run


def runs_here(choice, x, w, roots):
    """Whether a choice can be launched; one that cannot is named and left out."""
    try:
        leaf_gemm.leaf_sums(x, w, roots, choice)
    except Exception as error:
        print(f"left out: {words(choice)}: {str(error)[:120]}", flush=True)
        return False
    return True


@cache
def admitted(device):
    """What start-up admits of the committed table."""
    rows = tuned_row_products(["qwen3-8b"], (1, 2, 4))
    return admission.check(rows, device, {"column": 8192, "head": 256}).admitted


def times_of(name, n, k, ranks, m, deadline):
    """One line: the best choice, the chosen one, the peer. Returns their ratios to the peer."""
    leaves, width = LEAVES // ranks, k // LEAVES
    roots = rank_roots("pairs", ranks, 0)
    count = max(2, min(12, int(200e6 // (leaves * n * width * 2)) + 1))
    weights = [draw(leaves, n, width, seed=i) * 0.02 for i in range(count if m <= 1024 else 2)]
    x, residual, weight = draw(m, leaves * width), draw(m, n, dtype=torch.float32), draw(n)
    chosen = admitted(x.device).leaf_choice(x, n, leaves, roots)
    if chosen is None:
        chosen = leaf_choice(m, n, width, leaves, roots, float32=False, sms=132, gpu=H200)
    choices = all_choices(m, n, width, leaves, roots)
    choices = [chosen, *(choice for choice in choices if choice != chosen)]
    choices = [choice for choice in choices if runs_here(choice, x, weights[0], roots)]
    runs = [with_norm(x, roots, choice, residual, weight) for choice in choices]
    repeats = 3 if time.time() < deadline else 1
    peer, *taken = interleaved_medians(
        [without_leaves(x, n, residual, weight), *runs], weights, repeats
    )
    ranked = sorted(zip(taken, choices, strict=True), key=lambda entry: entry[0])
    note = " | ".join(f"{t:.1f} {words(choice)}" for t, choice in ranked[:3])
    print(
        f"{name:8s} TP {ranks} M={m:4d} cuBLAS+norm {peer:7.1f} us | chosen {taken[0]:7.1f} "
        f"ratio {taken[0] / peer:4.2f} {words(chosen)} | best ratio {ranked[0][0] / peer:4.2f} "
        f"of {len(choices)}: {note}",
        flush=True,
    )
    return taken[0] / peer, ranked[0][0] / peer


def print_times():
    """Print every shape, size and number of rows; then means of ratios."""
    start = time.time()
    shapes = [(n, k // LEAVES) for n, k, _ in SHAPES.values()]
    attempt("compile", compile_all, ("pairs",), (1, 2, 4), shapes, ROWS)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    deadline, ratios = time.time() + BUDGET, {"few": [], "many": []}
    for name, (n, k, sizes) in SHAPES.items():
        for ranks in sizes:
            for m in ROWS:
                if name.startswith("70B") and m not in (1, 64, 256, 1024, 4096):
                    continue
                found = []
                case = lambda *args, found=found: found.append(times_of(*args))
                attempt(f"times {name}/{ranks} M={m}", case, name, n, k, ranks, m, deadline)
                ratios["few" if m <= 512 else "many"] += found
    for label, found in ratios.items():
        means = [
            math.exp(sum(map(math.log, part)) / len(part)) for part in zip(*found, strict=True)
        ]
        print(f"{label}: geometric mean, chosen and best: {means}", flush=True)


def norm_times():
    """Print times of fold_and_norm by warps."""
    for n in (4096, 8192):
        for m in (1, 8, 16, 64, 132, 256, 1024, 8192):
            for count in (1, 2, 4, 8):
                if count * m * n <= 1 << 28:
                    norm_times_of(n, m, count)


def norm_times_of(n, m, count):
    """The same of M rows of N and so many partial sums."""
    weight, residual = draw(n), draw(m, n, dtype=torch.float32)
    values = [draw(count, m, n, dtype=torch.float32, seed=i) for i in range(2)]
    tree = (order.fold_tree("pairs", count),)

    def by(warps):
        return lambda v: finish.fold_and_norm(
            PartialSums(v, tree), Finish(residual, Norm(weight, EPS)), warps
        )

    plain = lambda v: norm.rms_norm(residual, Norm(weight, EPS))
    runs = [*map(by, (4, 8, 16, 32)), plain]
    *taken, alone = interleaved_medians(runs, values * 5, 5)
    each = " ".join(f"{t:.2f}" for t in taken)
    floor = (4 * count + 10) * m * n / 4.5e6
    print(
        f"N={n} M={m:4d} C={count}: warps 4 8 16 32: {each} us; rms_norm alone {alone:.2f}, "
        f"floor {floor:.2f}",
        flush=True,
    )


def main(arguments):
    """Print the parts that are named, else all."""
    return run_parts("kernels.rows", {"norm": norm_times, "times": print_times}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
