"""Times of products by packed weights, beside dense ones: of Qwen3-8B's shapes.

    python -m scripts.gpu_times.kernels.packed [int4] [fp8] ...

Weights of a time take turns on more than 230 MB, so that no cache holds them. A row has the
microseconds of the dense product, of reading the packed bytes once, and of each tile.
"""

import sys
from functools import partial

import torch
import triton
import triton.language as tl

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.gemm.packed import CANDIDATES, FORMS, ROOTS, SHAPES, cuts_of, form_of, product_by
from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.choice import shape_table
from tpdet.kernels.cuda.gemm.choice.shape_table import Admitted
from tpdet.kernels.cuda.gemm.column import column_gemm
from tpdet.kernels.cuda.gemm.gated import gated_gemm
from tpdet.kernels.cuda.gemm.leaf import leaf_sums
from tpdet.kernels.cuda.gemm.packed.admission import drawn_weight
from tpdet.kernels.cuda.gemm.packed.choice import PackedWay, fits, way_of
from tpdet.kernels.cuda.gemm.packed.product import in_scratch
from tpdet.kernels.inputs.ordered import OrderedWeight

ROWS = (1, 8, 16, 64, 128, 256, 512, 1024, 2048)

_TURNS = 230_000_000  # bytes


@triton.jit
def read_once(x, out, count, BLOCK: tl.constexpr):
    """Read `count` words; what is stored depends on them."""
    found = tl.zeros((BLOCK,), tl.int32)
    for at in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        found ^= tl.load(x + at + tl.arange(0, BLOCK))
    tl.store(out + tl.arange(0, BLOCK), found, mask=found == 0x12345678)


def wide_weight(name, shape):
    """A weight of a shape, whose blocks of rows are alike."""
    leaves, n, _ = shape
    small, _ = drawn_weight(form_of(name, shape), torch.device("cuda"))
    first = small.codes.view(leaves, -1, *small.codes.shape[1:])[:, :1]
    codes = first.expand(-1, n // 64, -1, -1).flatten(0, 1).contiguous()
    scales = small.scales[:, :, :1].expand(-1, -1, n // small.scale_rows).contiguous()
    zeros = None if small.zeros is None else small.zeros[:, :, :1].expand(-1, -1, n).contiguous()
    parts = {"codes": codes, "scales": scales, "zeros": zeros, "shape": shape}
    return OrderedWeight(**vars(small) | parts)


def copies_of(weight):
    """Copies of a weight that no cache holds together."""
    count = max(2, -(-_TURNS // weight.nbytes))
    if isinstance(weight, torch.Tensor):
        return [weight.clone() for _ in range(count)]
    parts = [{"codes": weight.codes.clone(), "scales": weight.scales.clone()} for _ in range(count)]
    return [OrderedWeight(**vars(weight) | part) for part in parts]


def dense_product(kind, x, admitted):
    """The product of numbers, as a function of them."""
    if kind == "row":
        return lambda w: leaf_sums(x, w, ROOTS, None, admitted)
    if kind == "gated":
        return lambda w: gated_gemm(x, w[0], None, admitted)
    return lambda w: column_gemm(x, w[0], None, None, None, admitted)


def times_of(name, shape_name):
    """Print a form's times of a shape by rows and tiles."""
    kind, shape = SHAPES[shape_name]
    whole = wide_weight(name, shape)
    copies, dense = copies_of(whole), copies_of(in_scratch(whole))
    table = shape_table.load_table(torch.cuda.get_device_name())
    admitted = None if table is None else Admitted(table.products)
    out = torch.zeros(4096, dtype=torch.int32, device="cuda")
    for rows in ROWS:
        x = trial_data.trial_rows("random", rows, shape[0] * shape[2], out.device)
        tiles = [tile for tile in CANDIDATES if fits(tile, shape[2]) and tile.rows < 4 * rows + 8]
        tiles = [tile for tile in tiles if tile.rows >= min(rows, 64)]
        ways = [PackedWay(tile, cut) for tile in tiles for cut in cuts_of(kind, tile)]
        marks = ["*" * (way == way_of(rows, shape, whole.group)) for way in ways]
        names = [f"{m}{tuple(w.tile)} by {w.cut}" for m, w in zip(marks, ways, strict=True)]
        names = ["read", "unpack", *names]
        runs = [partial(read_bytes, out), in_scratch]
        runs += [product_by(kind, x, *way) for way in ways]
        [taken] = interleaved_medians([dense_product(kind, x, admitted)], dense, 7)
        each = interleaved_medians(runs, copies, 7)
        said = "  ".join(f"{n} {us:.2f}" for n, us in zip(names, each, strict=True))
        print(f"{name:12} {shape_name:8} {rows:4} rows: dense {taken:.2f}  {said}", flush=True)


def read_bytes(out, weight):
    """Read a weight's codes once."""
    read_once[(528,)](weight.codes, out, weight.codes.numel(), BLOCK=4096)


def main(arguments):
    """Print the parts that are named, else all."""
    parts = {name: lambda name=name: [times_of(name, shape) for shape in SHAPES] for name in FORMS}
    return run_parts("kernels.packed", parts, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
