"""The launches of decode attention, their workspace and the counters of a fused merge."""

from functools import cache

import torch
import triton

from tpdet.kernels.cuda.attention.decode import attend_splits
from tpdet.kernels.cuda.attention.merge_splits import merge_splits
from tpdet.kernels.cuda.attention.split import score_scale
from tpdet.kernels.cuda.attention.variants import Variant
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.inputs.paged_batch import PagedBatch

_LEAST_CHUNK, _CHUNK_VALUES = 32, 1 << 14  # splits, and fp32 values, that a merge loads together
_MERGE_UNROLL = 16
_MERGE_VALUES = 48  # fp32 values of states that a thread of a fused merge loads ahead
_LEAST_ARRIVALS = 1 << 14


def launch_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
    variant: Variant,
    shape: dict[str, int],
    out: torch.Tensor,
) -> None:
    """Splits in parallel, then their merge, into out [M, Hq, D]; `shape`: what kernels compile for.

    The fp32 workspace is this call's own. Raises RuntimeError in a graph's capture of a fused merge
    whose counters no earlier call made.
    """
    if not batch.splits.shape[0]:
        return
    key_heads, row_count = shape["KEY_HEADS"], batch.short_rows * shape["GROUP"]
    row_parts = triton.cdiv(row_count, variant.rows)
    arrivals = batch.splits
    if variant.fused:
        arrivals = arrival_counters(batch.rows.shape[0] * row_parts * key_heads, q.device)
    states = batch.splits.shape[0] * key_heads * row_count
    largest, mass = (torch.empty(states, dtype=torch.float32, device=q.device) for _ in "lm")
    total = torch.empty(states, q.shape[2], dtype=torch.float32, device=q.device)
    attend_splits[(batch.splits.shape[0] * row_parts * key_heads,)](
        q,
        k_pages,
        v_pages,
        out,
        largest,
        mass,
        total,
        arrivals,
        batch.splits,
        batch.rows,
        batch.tables,
        q.stride(0),
        batch.tables.shape[1],
        window or 0,
        row_count,
        row_parts,
        score_scale(q.shape[2]),
        **shape,
        **decode_constants(variant, row_count, shape["LANES"]),
        num_warps=variant.warps,
        num_stages=variant.stages,
        enable_fp_fusion=False,
        **dependent_launch(q.device),
    )
    if variant.fused:
        return
    average = batch.splits.shape[0] // max(1, batch.short.shape[0])
    merge_splits[(batch.short.shape[0] * batch.short_rows * q.shape[1],)](
        out,
        largest,
        mass,
        total,
        batch.short,
        batch.rows,
        window or 0,
        row_count,
        batch.short_rows,
        **shape,
        CHUNK=merge_chunk(average, shape["LANES"]),
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(q.device),
    )


def merge_chunk(splits: int, lanes: int) -> int:
    """How many splits are loaded together where a sequence has about so many."""
    return max(_LEAST_CHUNK, min(triton.next_power_of_2(splits), _CHUNK_VALUES // lanes))


def decode_constants(variant: Variant, row_count: int, lanes: int) -> dict[str, int]:
    """What a variant compiles into the split kernel for `row_count` rows of a sequence."""
    merged = min(variant.rows, triton.next_power_of_2(row_count)) if variant.fused else 1
    ahead = _MERGE_VALUES * 32 * variant.warps // (merged * lanes)
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
    return _counters(max(triton.next_power_of_2(count), _LEAST_ARRIVALS), device)


@cache
def _counters(size: int, device: torch.device) -> torch.Tensor:
    """Kept for good: captured graphs hold its address. Raises RuntimeError inside a capture."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run attention of this shape once before it is captured in a graph")
    return torch.zeros(size, dtype=torch.int32, device=device)
