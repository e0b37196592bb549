"""`tpdet bench gemm`: the engine's matrix products beside torch's `linear`, in turn, in graphs.

Row-parallel products include the fold of their leaves with residual stream and norm; `linear` is
followed by the same norm. A gated product includes its activation; `linear` is followed by it, as
in stock engines. At TP above 1 only rank 0's first root is folded: the exchange, which is
not timed here, does the rest.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import linear

from tpdet.kernels import ops
from tpdet.kernels.inputs.activations import GATED_KINDS
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.inputs.product import HEAD_ROWS, Product, read_roots
from tpdet.kernels.partial_sums import PartialSums, whole_sum
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.models.products import model_products
from tpdet.runner.start.kernel_checks import admit_products
from tpdet.tools.bench.kernels.gpu import gpu_only, random_values, this_gpu
from tpdet.tools.measurement.floor import CaseWork, print_floor
from tpdet.tools.measurement.graph_times import enough, rotated, times_us
from tpdet.tools.measurement.rows import BenchRow, finish, kernel_row
from tpdet.tools.worlds.lists import parse_sizes
from tpdet.tools.worlds.shapes import shards

PEERS = {"row": "linear + norm"} | dict.fromkeys(GATED_KINDS, "linear + activation")
"""What stands beside a product, by its kind; beside the others, `linear` alone."""

_EPS = 1e-6

Run = Callable[[torch.Tensor], object]
"""A product by a weight that no cache holds."""


def gemm_command(options: argparse.Namespace) -> int:
    """Every product of the named models at every size and number of rows."""
    gpu_only("gemm")
    cases: list[BenchRow] = []
    counts, names = parse_sizes(options.rows), options.model_shape.split(",")
    device = torch.device("cuda", torch.cuda.current_device())
    for name, partition in shards(names, parse_sizes(options.tp), options.fold_order):
        # The variants that an engine of this model would use.
        limits = {"column": max(counts), "head": HEAD_ROWS}
        admit_products(partition, device, limits, f"tpdet tune {name}")
        for product in model_products(partition):
            if product.experts:  # `tpdet bench experts` times these
                continue
            for rows in counts:
                if product.kind != "head" or rows <= HEAD_ROWS:
                    cases.append(_case(name, partition, product, rows, options))
            torch.cuda.empty_cache()
    return finish("gemm", this_gpu(), cases, options.output, as_json=options.json)


def product_work(product: LayerProduct, rows: int) -> CaseWork:
    """Operations, and the bytes of operands and results: bf16, fp32 for the head's results."""
    n, k = product.n, product.k
    out = 4 if product.kind == "head" else 2
    stream = 8 * rows * n if product.kind == "row" else 0  # the fp32 residual, in and out
    results = out * rows * product.product.outputs
    return CaseWork(2.0 * rows * n * k, 2.0 * (n * k + rows * k) + results + stream)


def _case(
    name: str, partition: Partition, product: LayerProduct, rows: int, options: argparse.Namespace
) -> BenchRow:
    ranks, row_parallel = partition.world.size, product.kind == "row"
    work = product_work(product, rows)
    floor = print_floor(f"{name} {product.name}, TP {ranks}, {rows} rows", work)
    weights = enough(rotated(random_values(product.n, product.k, seed=1)), rows)
    runs = (_row_runs if row_parallel else _column_runs)(partition, product.product, rows, weights)
    ours, other = times_us(runs, weights, options.repeats)
    peer = PEERS.get(product.kind, "linear"), other
    mode = options.fold_order if row_parallel else None
    case = {"model": name, "tp": ranks, "batch": rows, "mode": mode}
    return kernel_row(f"gemm {product.name}", ours, floor, peer, work, **case)


def _column_runs(
    partition: Partition, product: Product, rows: int, weights: Sequence[torch.Tensor]
) -> list[Run]:
    """Ours and `linear`; of a gated product with the activation of its rounded rows."""
    x = random_values(rows, weights[0].shape[1])
    activation, arithmetic = partition.config.activation, partition.arithmetic
    out = torch.float32 if product.kind == "head" else torch.bfloat16

    def gated_peer(weight: torch.Tensor) -> object:
        return ops.activate_and_multiply(linear(x, weight), activation=activation)

    if product.gated:
        return [lambda weight: arithmetic.gated(x, weight, activation), gated_peer]
    return [lambda weight: arithmetic.column(x, weight, None, out), partial(linear, x)]


def _row_runs(
    partition: Partition, product: Product, rows: int, weights: Sequence[torch.Tensor]
) -> list[Run]:
    """Ours with fold and norm, and `linear` with the norm."""
    n, k = weights[0].shape
    leaves = 1 if product.widths else product.leaves
    roots = read_roots(product.roots)
    x, residual = random_values(rows, k), random_values(rows, n, seed=2, dtype=torch.float32)
    finish = Finish(residual, Norm(random_values(n, seed=3), _EPS))

    def ours(weight: torch.Tensor) -> object:
        by_leaf = weight.view(leaves, n, k // leaves)
        sums = partition.arithmetic.row(x, by_leaf, roots, product.widths)
        if len(sums.roots) > 1:
            sums = PartialSums(sums.values, sums.roots[:1])
        return ops.fold_and_norm(sums, finish)

    def peer(weight: torch.Tensor) -> object:
        return ops.fold_and_norm(whole_sum(linear(x, weight)), finish)

    return [ours, peer]
