"""Times of the GPU's GEMMs, norm, fold and SiLU beside cuBLAS and the floor.

python -m scripts.gpu_times.kernels.gemm          times of the table's choices
python -m scripts.gpu_times.kernels.gemm sweep    of every variant, best first
"""

import sys
from dataclasses import replace

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.gemm.leaf_folds import leaf_fold
from tests.gpu.gemm.shapes import COLUMN_SHAPES, LEAVES, ROW_SHAPES
from tests.gpu.lib.checks import attempt, draw
from tpdet.kernels import order
from tpdet.kernels.cuda.cost.static import static_tiles
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.pointwise import activation, finish, fold, norm
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import whole_sum

TIMED_ROWS = (1, 16, 64, 256, 1024, 4096)
NO_ROOM = (OutOfResources, PTXASError)  # a tile without the shared memory or registers it needs
FLOOR_BYTES = 4.5e12  # measured read bandwidth of an H200
FLOOR_FLOPS = 0.79e15  # the best cuBLAS product measured there


def copies(n, k):
    """Weights to rotate over, more than the L2 cache holds."""
    count = max(2, int(300e6 // (n * k * 2)) + 1)
    return [draw(n, k, seed=i) * 0.02 for i in range(count)]


def report(name, m, n, k, ours, peer, out_bytes=2, note=""):
    """Print a product's time beside cuBLAS's and the floor, microseconds."""
    flops, size = 2 * m * n * k, 2 * (n * k + m * k) + out_bytes * m * n
    floor = max(flops / FLOOR_FLOPS, size / FLOOR_BYTES) * 1e6
    print(
        f"{name:10s} M={m:4d} {ours:8.1f} us {flops / ours / 1e6:5.0f} TFLOP/s "
        f"{size / ours / 1e3:5.0f} GB/s | cuBLAS {peer:8.1f} us, time ratio {ours / peer:4.2f} | "
        f"floor {floor:7.1f} us, {ours / floor:4.2f} of it {note}",
        flush=True,
    )


def column_times(name, n, k, rows):
    """Print a column product's times by rows."""
    weights = copies(n, k)
    for m in rows:
        x = draw(m, k)
        ours = lambda w, x=x: gemm.column_gemm(x, w, None, torch.bfloat16)
        peer = lambda w, x=x: torch.nn.functional.linear(x, w)
        report(name, m, n, k, *interleaved_medians((ours, peer), weights))


def row_times(name, n, k, leaves, rows, fold_order="pairs"):
    """Print a row product's times by rows."""
    weights = copies(n, k)
    tree = (order.fold_tree(fold_order, leaves),)
    for m in rows:
        x = draw(m, k)
        ours = lambda w, x=x: leaf_fold(x, w.view(leaves, n, -1), tree, 1)
        peer = lambda w, x=x: torch.nn.functional.linear(x, w)
        times = interleaved_medians((ours, peer), weights)
        report(name, m, n, k, *times, out_bytes=4, note=fold_order)


def elementwise_times():
    """Print times of norm, SiLU and fold."""
    for m in (1, 64, 4096):
        elementwise_times_of(m)


def elementwise_times_of(m):
    """The same of m rows."""
    w = draw(4096)
    x, total = (draw(m, 4096, dtype=torch.float32, seed=seed) for seed in (0, 1))
    wide, parts = draw(m, 24576), draw(8, m, 4096, dtype=torch.float32)
    roots = (order.fold_tree("pairs", 8),)
    cases = {
        "rms_norm": (lambda _: norm.rms_norm(x, Norm(w, 1e-6)), 6 * m * 4096),
        "add + norm": (
            lambda _: finish.fold_and_norm(whole_sum(total), Finish(x, Norm(w, 1e-6))),
            14 * m * 4096,
        ),
        "silu": (lambda _: activation.activate_and_multiply(wide, wide.dtype), 3 * m * 24576),
        "fold 8": (lambda _: fold.fold_roots(parts, 0, roots, 1), 36 * m * 4096),
    }  # fmt: skip
    for name, (run, size) in cases.items():
        (taken,) = interleaved_medians((run,), [None] * 10)
        print(f"{name:10s} M={m:4d} {taken:8.1f} us {size / taken / 1e3:5.0f} GB/s", flush=True)


def print_times():
    """Print times of all shapes by the table's choices."""
    for name, (n, k) in COLUMN_SHAPES.items():
        rows = [m for m in TIMED_ROWS if name != "lm_head" or m <= 256]
        attempt(f"times {name}", column_times, name, n, k, rows)
        if name != "lm_head":
            attempt(f"times {name}/4", column_times, f"{name}/4", n // 4, k, TIMED_ROWS)
    for name, (n, k) in ROW_SHAPES.items():
        for ranks in (1, 4):
            label = name if ranks == 1 else f"{name}/{ranks}"
            shape = n, k // ranks, LEAVES // ranks
            attempt(f"times {label}", row_times, label, *shape, TIMED_ROWS)
        attempt(f"times {name} seq", row_times, name, n, k, LEAVES, (64, 4096), "sequential")
    attempt("times elementwise", elementwise_times)


def sweep_candidates(wide_out):
    """Tiles to try: the static ones and some more."""
    yield from static_tiles(float32=False, wide_out=wide_out, descriptors=True)
    for rows, columns, depth, warps, stages in (
        (16, 64, 256, 4, 3),
        (32, 64, 128, 4, 5),
        (64, 64, 64, 4, 6),
        (64, 128, 64, 4, 6),
        (64, 128, 128, 4, 3),
        (64, 256, 64, 8, 4),
        (128, 64, 128, 4, 3),
        (128, 128, 64, 4, 4),
        (128, 128, 128, 8, 3),
        (128, 192, 64, 8, 3),
        (256, 128, 64, 8, 3),
        (32, 32, 128, 4, 5),
        (64, 32, 128, 4, 5),
        (32, 64, 256, 4, 3),
        (64, 64, 256, 4, 3),
        (32, 128, 64, 4, 6),
    ):
        if columns != 192:
            plain = Tile(rows, columns, depth, warps, stages, "descriptor")
            yield plain
            if rows * columns <= 64 * 128:
                yield replace(plain, ctas=2)


def sweep():
    """Print the quickest four tiles of each shape and number of rows."""
    cases = [("column", name, *shape) for name, shape in COLUMN_SHAPES.items() if name != "lm_head"]
    cases += [("column", f"{name}/4", n // 4, k) for _, name, n, k in cases]
    for _, name, n, k in cases:
        weights = copies(n, k)
        for m in (16, 64, 128, 256, 512, 1024):
            x, found = draw(m, k), []
            (peer,) = interleaved_medians(
                (lambda w, x=x: torch.nn.functional.linear(x, w),), weights
            )
            for variant in sweep_candidates(False):
                if variant.rows > 2 * max(m, 16):
                    continue
                run = lambda w, v=variant, x=x: gemm.column_gemm(x, w, None, x.dtype, v)
                try:
                    found.append((interleaved_medians((run,), weights, repeats=3)[0], variant))
                except NO_ROOM as error:
                    print(f"{name} M={m} {variant}: {error}", flush=True)
            found.sort(key=lambda entry: entry[0])
            best = " | ".join(
                f"{t / peer:.2f} {v.rows}x{v.columns}x{v.depth} w{v.warps} s{v.stages}"
                f" {v.variant} c{v.ctas}"
                for t, v in found[:4]
            )
            print(f"{name:10s} M={m:4d} cuBLAS {peer:6.1f} us: {best}", flush=True)


def main(arguments):
    """Print the parts that are named, else all."""
    parts = {"times": print_times, "sweep": sweep}
    return run_parts("kernels.gemm", parts, arguments or ["times"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
