"""The launches of decode attention, their workspace and the counters of a fused merge."""

from functools import cache

import torch

from tpdet.kernels.cuda.attention.decode import attend_splits
from tpdet.kernels.cuda.attention.merge_splits import merge_splits
from tpdet.kernels.cuda.attention.split import score_cap, score_scale
from tpdet.kernels.cuda.attention.variants import AttentionVariant
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.inputs.paged_batch import PagedBatch

_LEAST_CHUNK, _CHUNK_VALUES = 32, 1 << 14  # splits, and fp32 values, that a merge loads together
_MERGE_UNROLL = 16
_MERGE_VALUES = 48  # fp32 values of states that a thread of a fused merge loads ahead
_MERGE_WARPS = 4  # what the layouts of `merge_splits` are made for
_WARP_THREADS = 32
_LEAST_ARRIVALS = 1 << 14

Workspace = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""By split, key head and row: the largest score [S], the mass [S], weighted values [S, D]; fp32."""


def launch_decode(
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
    """Splits in parallel, then their merge, into out [M, Hq, D]; `shape`: what kernels compile for.

    cap: of scores, 0 for none; sinks: fp32 [Hq], or None.
    Each call makes its fp32 workspace. Raises RuntimeError in a graph's capture of a fused merge
    whose counters no earlier call made.
    """
    if not batch.splits.shape[0]:
        return
    row_count = batch.short_rows * shape["GROUP"]
    states = batch.splits.shape[0] * shape["KEY_HEADS"] * row_count
    largest, mass = (torch.empty(states, dtype=torch.float32, device=q.device) for _ in "lm")
    total = torch.empty(states, q.shape[2], dtype=torch.float32, device=q.device)
    workspace = (largest, mass, total)
    asked = q, k_pages, v_pages, batch, window or 0, variant, shape, cap, sinks, out, workspace
    _launch_splits(*asked)
    if not variant.fused:
        _launch_merge(batch, window or 0, shape, sinks, out, workspace)


def _launch_splits(
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
    workspace: Workspace,
) -> None:
    """Every split's state; where the variant is fused, out too."""
    key_heads, row_count = shape["KEY_HEADS"], batch.short_rows * shape["GROUP"]
    row_parts = cdiv(row_count, variant.rows)
    arrivals = batch.splits
    if variant.fused:
        arrivals = arrival_counters(batch.rows.shape[0] * row_parts * key_heads, q.device)
    attend_splits[(batch.splits.shape[0] * row_parts * key_heads,)](
        q,
        k_pages,
        v_pages,
        out,
        *workspace,
        arrivals,
        out if sinks is None else sinks,
        batch.splits,
        batch.rows,
        batch.tables,
        q.stride(0),
        batch.tables.shape[1],
        window,
        row_count,
        row_parts,
        score_scale(q.shape[2], cap),
        **shape,
        CAP=score_cap(q.shape[2], cap),
        **decode_constants(variant, row_count, shape["LANES"]),
        num_warps=variant.warps,
        num_stages=variant.stages,
        enable_fp_fusion=False,
        **dependent_launch(q.device),
    )


def _launch_merge(
    batch: PagedBatch,
    window: int,
    shape: dict[str, int],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """All states of a row to its result, a program a row."""
    average = batch.splits.shape[0] // max(1, batch.short.shape[0])
    merge_splits[(batch.short.shape[0] * batch.short_rows * out.shape[1],)](
        out,
        *workspace,
        out if sinks is None else sinks,
        batch.short,
        batch.rows,
        window,
        batch.short_rows * shape["GROUP"],
        batch.short_rows,
        **shape,
        CHUNK=merge_chunk(average, shape["LANES"]),
        num_warps=_MERGE_WARPS,
        enable_fp_fusion=False,
        **dependent_launch(out.device),
    )


def merge_chunk(splits: int, lanes: int) -> int:
    """How many splits the merge loads together, where a sequence has `splits` on average."""
    return max(_LEAST_CHUNK, min(next_power_of_2(splits), _CHUNK_VALUES // lanes))


def decode_constants(variant: AttentionVariant, row_count: int, lanes: int) -> dict[str, int]:
    """What a variant compiles into the split kernel for `row_count` rows of a sequence."""
    merged = min(variant.rows, next_power_of_2(row_count)) if variant.fused else 1
    ahead = _MERGE_VALUES * _WARP_THREADS * variant.warps // (merged * lanes)
    return {
        "ROWS": variant.rows,
        "STAGES": variant.stages,
        "SWAPPED": variant.swapped,
        "FUSED": variant.fused,
        "MERGED": merged,
        "UNROLL": max(1, min(ahead, _MERGE_UNROLL)) if variant.fused else 1,
    }


def arrival_counters(count: int, device: torch.device) -> torch.Tensor:
    """`count` or more int32 counters, zero before and after every launch, of one stream."""
    return _counters(max(next_power_of_2(count), _LEAST_ARRIVALS), device)


@cache
def _counters(size: int, device: torch.device) -> torch.Tensor:
    """Kept for good: captured graphs hold its address. Raises RuntimeError inside a capture."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run attention of this shape once before it is captured in a graph")
    return torch.zeros(size, dtype=torch.int32, device=device)
