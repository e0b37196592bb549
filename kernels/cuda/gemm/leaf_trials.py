"""Trials of row products: every choice against every leaf apart, in bytes, on `trial_data`.

A choice's sums are folded by torch, one fp32 addition a node, as its reader would fold them.
"""

import torch

from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.inputs.product import Product, read_roots
from tpdet.kernels.order import evaluate
from tpdet.kernels.partial_sums import PartialSums


def trial_leaves(kind: str, product: Product, device: torch.device) -> torch.Tensor:
    """A weight [leaves, n, k] in bf16 whose rows repeat after BASE_ROWS."""
    flat = trial_data.trial_weight(kind, product.n, product.leaves * product.k, device)
    return flat.view(product.n, product.leaves, product.k).permute(1, 0, 2).contiguous()


def folded(sums: PartialSums) -> torch.Tensor:
    """All roots [R, M, N] of sums [C, M, N] in fp32."""
    values = sums.values
    return torch.stack([evaluate(root, lambda i: values[i], torch.add) for root in sums.roots])


def wanted_roots(
    x: torch.Tensor, weight: torch.Tensor, product: Product, reference: Tile
) -> torch.Tensor:
    """x [M, leaves * k], every leaf apart by `reference` -> [R, M, at most BASE_ROWS] in fp32."""
    base = weight[:, : trial_data.BASE_ROWS]
    leaves = leaf_gemm.leaf_gemm(x, base, reference.at(product.k))
    return folded(PartialSums(leaves, read_roots(product.roots)))


def differs(sums: PartialSums, wanted: torch.Tensor) -> torch.Tensor:
    """Whether the folded sums [R, M, N] have other bytes than wanted; a bool on the device."""
    return trial_data.differs(folded(sums).flatten(0, 1), wanted.flatten(0, 1))
