"""The launches of prefill attention: `prefill.py` or, on Hopper, `prefill_warp_specialised.py`."""

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpdet.kernels.cuda.attention.prefill import attend_blocks
from tpdet.kernels.cuda.attention.prefill_warp_specialised import attend_warp_specialised
from tpdet.kernels.cuda.attention.split import score_cap, score_scale
from tpdet.kernels.cuda.attention.variants import (
    WARP_SPECIALISED_HEAD,
    WARP_SPECIALISED_TYPES,
    AttentionVariant,
)
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.cuda.launch.warp_pipeline import tile_layout
from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS, PagedBatch
from tpdet.kernels.order import TILE_TOKENS

_SWIZZLE_BYTES = 128  # a line of a tile in shared memory
_VALUE_BITS = 16


def launch_prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
    variant: AttentionVariant,
    shape: dict[str, int],
    cap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attention of the batch's blocks into out [M, Hq, D]; `shape`: what kernels compile for.

    cap: of scores, 0 for none; sinks: fp32 [Hq], or None. Raises ValueError where the variant is
    warp-specialised and has no kernel for the head, the type, a cap or sinks.
    """
    if not batch.blocks.shape[0]:
        return
    launch = _launch_warp_specialised if variant.warp_specialised else _launch_blocks
    launch(q, k_pages, v_pages, batch, window or 0, variant, shape, cap, sinks, out)


def _items(batch: PagedBatch, variant: AttentionVariant, shape: dict[str, int]) -> int:
    """Parts of `variant.rows` rows of a block, for each key head."""
    parts = BLOCK_TOKENS * shape["GROUP"] // variant.rows
    return batch.blocks.shape[0] * parts * shape["KEY_HEADS"]


def _launch_warp_specialised(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int,
    variant: AttentionVariant,
    shape: dict[str, int],
    cap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    _check_warp_specialised(q, cap > 0 or sinks is not None)
    items = _items(batch, variant, shape)
    head = shape["HEAD"]
    layout = tile_layout(_SWIZZLE_BYTES, _VALUE_BITS)
    k_tiles, v_tiles = (
        LaidOutDescriptor.from_tensor(pages.view(-1, head), [TILE_TOKENS, head], layout)
        for pages in (k_pages, v_pages)
    )
    attend_warp_specialised[(min(items, multiprocessors(q.device)),)](
        q,
        k_tiles,
        v_tiles,
        out,
        batch.blocks,
        batch.rows,
        batch.tables,
        items,
        q.stride(0),
        batch.tables.shape[1],
        window,
        score_scale(head),
        **{name: shape[name] for name in ("KEY_HEADS", "GROUP", "HEAD", "WINDOW")},
        BLOCK=BLOCK_TOKENS,
        STAGES=variant.stages,
        num_warps=variant.warps,
        enable_fp_fusion=False,
    )


def _launch_blocks(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int,
    variant: AttentionVariant,
    shape: dict[str, int],
    cap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    head = shape["HEAD"]
    tiles: list[torch.Tensor | TensorDescriptor] = [k_pages, v_pages]
    if variant.descriptors:
        block = [TILE_TOKENS, shape["LANES"]]
        flat = [pages.view(-1, head) for pages in (k_pages, v_pages)]
        tiles = [TensorDescriptor.from_tensor(pages, block) for pages in flat]
    attend_blocks[(_items(batch, variant, shape),)](
        q,
        k_pages,
        v_pages,
        *tiles,
        out,
        batch.blocks,
        batch.rows,
        batch.tables,
        q if sinks is None else sinks,
        q.stride(0),
        batch.tables.shape[1],
        window,
        score_scale(head, cap),
        **shape,
        CAP=score_cap(head, cap),
        DESCRIPTORS=variant.descriptors,
        BLOCK=BLOCK_TOKENS,
        ROWS=variant.rows,
        STAGES=variant.stages,
        num_warps=variant.warps,
        num_stages=variant.stages,
        enable_fp_fusion=False,
    )


def _check_warp_specialised(q: torch.Tensor, more: bool) -> None:
    if q.shape[2] != WARP_SPECIALISED_HEAD or q.dtype not in WARP_SPECIALISED_TYPES or more:
        raise ValueError(
            f"warp-specialised attention of {q.dtype} heads of {q.shape[2]}: it has heads of "
            f"{WARP_SPECIALISED_HEAD}, one of {WARP_SPECIALISED_TYPES}, without soft-cap and sinks"
        )
