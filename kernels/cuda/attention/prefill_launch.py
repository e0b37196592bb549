"""The launches of prefill attention: `prefill.py` or, on Hopper, its groups of warps."""

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpdet.kernels.cuda.attention.prefill import attend_blocks
from tpdet.kernels.cuda.attention.prefill_warp_specialised import attend_groups
from tpdet.kernels.cuda.attention.split import score_scale
from tpdet.kernels.cuda.attention.variants import GROUPS_HEAD, GROUPS_TYPES, Variant
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS, PagedBatch
from tpdet.kernels.order import TILE_TOKENS


def launch_prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
    variant: Variant,
    shape: dict[str, int],
    out: torch.Tensor,
) -> None:
    """Attention of the batch's blocks into out [M, Hq, D]; `shape`: what kernels compile for.

    Raises ValueError for groups of warps of a head or type that they do not have.
    """
    if not batch.blocks.shape[0]:
        return
    parts = BLOCK_TOKENS * shape["GROUP"] // variant.rows
    items = batch.blocks.shape[0] * parts * shape["KEY_HEADS"]
    flat = [pages.view(-1, q.shape[2]) for pages in (k_pages, v_pages)]
    arguments = (
        out,
        batch.blocks,
        batch.rows,
        batch.tables,
        q.stride(0),
        batch.tables.shape[1],
        window or 0,
        score_scale(q.shape[2]),
    )
    if variant.groups:
        _check_groups(q)
        layout = NVMMASharedLayout(128, 16, 2)
        block = [TILE_TOKENS, shape["HEAD"]]
        laid_out = [LaidOutDescriptor.from_tensor(pages, block, layout) for pages in flat]
        programs = min(items, multiprocessors(q.device))
        attend_groups[(programs,)](
            q,
            *laid_out,
            *arguments[:4],
            items,
            *arguments[4:],
            **{name: shape[name] for name in ("KEY_HEADS", "GROUP", "HEAD", "WINDOW")},
            BLOCK=BLOCK_TOKENS,
            STAGES=variant.stages,
            num_warps=variant.warps,
            enable_fp_fusion=False,
        )
        return
    tiles: list[torch.Tensor | TensorDescriptor] = [k_pages, v_pages]
    if variant.descriptors:
        block = [TILE_TOKENS, shape["LANES"]]
        tiles = [TensorDescriptor.from_tensor(pages, block) for pages in flat]
    attend_blocks[(items,)](
        q,
        k_pages,
        v_pages,
        *tiles,
        *arguments,
        **shape,
        DESCRIPTORS=variant.descriptors,
        BLOCK=BLOCK_TOKENS,
        ROWS=variant.rows,
        STAGES=variant.stages,
        num_warps=variant.warps,
        num_stages=variant.stages,
        enable_fp_fusion=False,
    )


def _check_groups(q: torch.Tensor) -> None:
    if q.shape[2] != GROUPS_HEAD or q.dtype not in GROUPS_TYPES:
        raise ValueError(
            f"groups of warps for {q.dtype} heads of {q.shape[2]}: they have heads of "
            f"{GROUPS_HEAD}, one of {GROUPS_TYPES}"
        )
