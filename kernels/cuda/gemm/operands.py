"""What column and leaf products share: operands that fit, tensor descriptors, one launch."""

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants.tile import K_GROUP, Tile
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors

_DESCRIPTOR_BYTES = 16  # alignment of a base and of a row


def run_chain(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    sms: int,
    gated: int = 0,
) -> None:
    """x [M, L * K], w [L, N, K] contiguous, bias [N] or None -> y [L, M, N], filled.

    gated: the number of an activation; w and bias are then interleaved, and y [L, M, N / 2] is
    the activated gate * up.
    """
    if y.numel() == 0:
        return
    check_depth(tile, w)
    variant_of(tile).run(x, w, bias, y, tile, sms, gated)


def check_depth(tile: Tile, w: torch.Tensor) -> None:
    """A tile that crossed the end of a leaf's K would read its neighbour."""
    if w.shape[2] % tile.depth:
        raise ValueError(f"depth {tile.depth} does not divide K = {w.shape[2]}: use .at(K)")


def fitted(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x with contiguous rows and a contiguous weight [L, N, K]. Raises ValueError."""
    if x.dtype != w.dtype:
        raise ValueError(f"x is {x.dtype} and the weight {w.dtype}: give both one dtype")
    if x.shape[1] != w.shape[0] * w.shape[2] or w.shape[2] % K_GROUP:
        raise ValueError(
            f"x {tuple(x.shape)} does not fit a weight {tuple(w.shape)} whose reduced dimension "
            f"is a multiple of {K_GROUP}"
        )
    return (x if x.stride(1) == 1 else x.contiguous()), w.contiguous()


def descriptor_sms(*tensors: torch.Tensor) -> int:
    """Multiprocessors of a device with tensor descriptors, 0 if these tensors cannot use them."""
    if not hardware.gpu_of(tensors[0].device).descriptors:
        return 0
    for tensor in tensors:
        row = tensor.stride(-2) * tensor.element_size()
        if row % _DESCRIPTOR_BYTES or tensor.data_ptr() % _DESCRIPTOR_BYTES:
            return 0
    return multiprocessors(tensors[0].device)
