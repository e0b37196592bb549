"""Compile variants side by side, so that measuring waits for no compiler."""

import os
from collections.abc import Iterable

import torch

from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm.admission import by_tile
from tpdet.kernels.cuda.gemm.choice.leaf_choice import LeafChoice
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.launch.compile_pool import compile_all
from tpdet.kernels.cuda.launch.recording import recording
from tpdet.kernels.order import Expression, operands

ColumnJob = tuple[Tile, str, bool]
"""A variant, a product's kind, whether its tiles divide N: what a kernel is made for."""

LeafJob = tuple[tuple[Expression, ...], LeafChoice]
"""A rank's roots and a choice for them."""

Job = ColumnJob | LeafJob


def precompile(jobs: Iterable[Job], device: torch.device) -> int:
    """Compile every job; returns how many could not be (measuring then leaves them out).

    Their kernels are recorded on small operands and compiled on threads, each kernel once.
    """
    refused = 0
    with recording() as asked:
        for job in sorted(jobs, key=str):
            try:
                launch(job, device)
            except Exception:  # a tile that its launch refuses is no candidate
                refused += 1
    return refused + len(compile_all(asked.values(), len(os.sched_getaffinity(0))))


def launch(job: Job, device: torch.device) -> None:
    """Run a job's kernel on small operands. Raises what its launch raises."""
    if len(job) == 2:
        _launch_leaves(*job, device)
    else:
        _launch_column(*job, device)


def _launch_column(variant: Tile, kind: str, even: bool, device: torch.device) -> None:
    n, k = 2 * variant.columns + (0 if even else 16), 2 * variant.depth
    x = torch.zeros(1, k, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(n, k, dtype=torch.bfloat16, device=device)
    by_tile(kind, x, weight, variant)


def _launch_leaves(roots: tuple[Expression, ...], choice: LeafChoice, device: torch.device) -> None:
    n, k = 2 * choice.tile.columns, 2 * choice.tile.depth
    leaves = sum(len(operands(root)) for root in roots)
    x = torch.zeros(1, leaves * k, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(leaves, n, k, dtype=torch.bfloat16, device=device)
    leaf_gemm.leaf_sums(x, weight, roots, choice)
