"""Queries rotated, keys rotated and stored, values stored: the three operations in turn."""

import torch

from tpdet.kernels.cpu.pointwise.embedding import store_kv
from tpdet.kernels.cpu.pointwise.rotary import rotate_heads
from tpdet.kernels.inputs.paged_batch import PagedBatch


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    pages: tuple[torch.Tensor, torch.Tensor],
    batch: PagedBatch,
) -> torch.Tensor:
    """q [M, Hq, D] rotated; k rotated and v [M, Hkv, D] stored to pages, as `store_kv`.

    The tables [positions, D / 2] fp32 are read at each row's position.
    """
    cos, sin = (table[batch.positions] for table in tables)
    rotated = rotate_heads(k, cos, sin, norms[1], eps)
    store_kv(rotated, v, *pages, batch)
    return rotate_heads(q, cos, sin, norms[0], eps)
