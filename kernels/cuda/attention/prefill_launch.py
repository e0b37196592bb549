"""The launches of prefill attention: `prefill.py` or, on Hopper, `prefill_warp_specialised.py`."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tpdet.kernels.cuda.attention.operands import AttentionCall, AttentionShape, page_tiles
from tpdet.kernels.cuda.attention.prefill import PrefillForm, attend_blocks
from tpdet.kernels.cuda.attention.prefill_warp_specialised import attend_warp_specialised
from tpdet.kernels.cuda.attention.variants import (
    WARP_SPECIALISED_HEAD,
    WARP_SPECIALISED_TYPES,
    AttentionVariant,
)
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS, PagedBatch
from tpdet.kernels.order import TILE_TOKENS


def launch_prefill(call: AttentionCall, batch: PagedBatch, variant: AttentionVariant) -> None:
    """Attention of the batch's blocks into the call's `out`.

    Raises ValueError where the variant is warp-specialised and has no kernel for the head, the
    type, a cap or sinks.
    """
    if batch.blocks.shape[0]:
        launch = _launch_warp_specialised if variant.warp_specialised else _launch_blocks
        launch(call, batch, variant)


def _items(batch: PagedBatch, variant: AttentionVariant, shape: AttentionShape) -> int:
    """Parts of `variant.rows` rows of a block, for each key head."""
    parts = BLOCK_TOKENS * shape.GROUP // variant.rows
    return batch.blocks.shape[0] * parts * shape.KEY_HEADS


def _launch_warp_specialised(
    call: AttentionCall, batch: PagedBatch, variant: AttentionVariant
) -> None:
    _check_warp_specialised(call)
    operands, shape, window, _ = call
    items = _items(batch, variant, shape)
    attend_warp_specialised[(min(items, multiprocessors(operands.q.device)),)](
        operands,
        *page_tiles(call, TILE_TOKENS),
        batch.blocks,
        batch.rows,
        batch.tables,
        items,
        batch.tables.shape[1],
        window,
        shape,
        BLOCK_TOKENS,
        variant.stages,
        num_warps=variant.warps,
        enable_fp_fusion=False,
    )


def _launch_blocks(call: AttentionCall, batch: PagedBatch, variant: AttentionVariant) -> None:
    operands, shape, window, cap = call
    tiles: list[torch.Tensor | TensorDescriptor] = [operands.k_pages, operands.v_pages]
    if variant.descriptors:
        block = [TILE_TOKENS, shape.LANES]
        flat = [pages.view(-1, shape.HEAD) for pages in (operands.k_pages, operands.v_pages)]
        tiles = [TensorDescriptor.from_tensor(pages, block) for pages in flat]
    attend_blocks[(_items(batch, variant, shape),)](
        operands,
        *tiles,
        batch.blocks,
        batch.rows,
        batch.tables,
        batch.tables.shape[1],
        window,
        shape,
        PrefillForm(variant.descriptors, BLOCK_TOKENS, variant.rows, variant.stages),
        cap,
        num_warps=variant.warps,
        num_stages=variant.stages,
        enable_fp_fusion=False,
    )


def _check_warp_specialised(call: AttentionCall) -> None:
    q, more = call.operands.q, call.cap is not None or call.shape.SINKS
    more = more or call.operands.k_pages.dtype != q.dtype
    if q.shape[2] != WARP_SPECIALISED_HEAD or q.dtype not in WARP_SPECIALISED_TYPES or more:
        raise ValueError(
            f"warp-specialised attention of {q.dtype} heads of {q.shape[2]}: it has heads of "
            f"{WARP_SPECIALISED_HEAD}, one of {WARP_SPECIALISED_TYPES}, pages of that, without "
            "soft-cap and sinks"
        )
