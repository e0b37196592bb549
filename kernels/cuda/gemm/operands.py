"""What column and leaf products share: operands that fit, tensor descriptors, one launch."""

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants.tile import K_GROUP, Tile
from tpdet.kernels.cuda.gemm.variants.variant import DESCRIPTOR_BYTES, Operands
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors


def run_chain(operands: Operands, tile: Tile, sms: int) -> None:
    """y is filled by the tile's variant. Raises ValueError for a tile that does not fit."""
    if operands.y.numel() == 0:
        return
    check_depth(tile, operands)
    variant = variant_of(tile)
    if operands.widths and not variant.unequal:
        raise ValueError(f"{tile.variant} takes no unequal leaves: use descriptor")
    variant.run(operands, tile, sms)


def check_depth(tile: Tile, operands: Operands) -> None:
    """A tile that crossed the end of a leaf's K would read its neighbour."""
    k, depth, widths = operands.w.shape[2], tile.depth, operands.widths
    if widths and (sum(widths) != k or any(width % depth for width in widths)):
        raise ValueError(f"depth {depth} does not divide leaves {widths} of {k}")
    if k % depth:
        raise ValueError(f"depth {depth} does not divide K = {k}: use .at(K)")


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
        if row % DESCRIPTOR_BYTES or tensor.data_ptr() % DESCRIPTOR_BYTES:
            return 0
    return multiprocessors(tensors[0].device)
