"""Queries rotated, keys rotated and stored, values stored: the three operations in turn."""

import torch

from tpdet.kernels.cpu.pointwise.embedding import store_kv
from tpdet.kernels.cpu.pointwise.rotary import rotate_heads
from tpdet.kernels.inputs.paged_batch import PagedBatch


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    eps: float,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
) -> torch.Tensor:
    """q [M, Hq, D] rotated; k rotated and v [M, Hkv, D] stored to pages [P, Hkv, 256, D].

    The tables [positions, D / 2] fp32 are read at each row's position.
    """
    cos, sin = cos_table[batch.positions], sin_table[batch.positions]
    rotated = rotate_heads(k, cos, sin, key_norm, eps)
    store_kv(rotated, v, k_pages, v_pages, batch)
    return rotate_heads(q, cos, sin, query_norm, eps)
