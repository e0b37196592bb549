"""Compile variants in processes side by side: Triton's cache on disk then serves this one."""

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

import torch

from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm.admission import by_tile
from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.order import Expression, operands

_WORKERS = 14

ColumnJob = tuple[Tile, str, bool]
"""A variant, a product's kind, whether its tiles divide N: what a kernel is made for."""

LeafJob = tuple[tuple[Expression, ...], LeafChoice]
"""A rank's roots and a choice for them."""

Job = ColumnJob | LeafJob


def precompile(jobs: Iterable[Job]) -> int:
    """Compile every job; returns how many could not be (measuring then leaves them out)."""
    ordered = sorted(jobs, key=str)
    workers = max(1, min(_WORKERS, len(os.sched_getaffinity(0)) - 1, len(ordered)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        return sum(pool.map(compile_all, [ordered[i::workers] for i in range(workers)]))


def compile_all(jobs: list[Job]) -> int:
    """Run each job's kernel on small operands; returns how many failed."""
    failed = 0
    for job in jobs:
        try:
            if len(job) == 2:
                _compile_leaves(*job)
            else:
                _compile_column(*job)
        except Exception:  # a tile this GPU or compiler refuses is no candidate
            failed += 1
    torch.cuda.synchronize()
    return failed


def _compile_column(variant: Tile, kind: str, even: bool) -> None:
    n, k = 2 * variant.columns + (0 if even else 16), 2 * variant.depth
    x = torch.zeros(1, k, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(n, k, dtype=torch.bfloat16, device="cuda")
    by_tile(kind, x, weight, variant)


def _compile_leaves(roots: tuple[Expression, ...], choice: LeafChoice) -> None:
    n, k = 2 * choice.tile.columns, 2 * choice.tile.depth
    leaves = sum(len(operands(root)) for root in roots)
    x = torch.zeros(1, leaves * k, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(leaves, n, k, dtype=torch.bfloat16, device="cuda")
    leaf_gemm.leaf_sums(x, weight, roots, choice)
