"""Stock attention over the same pages, for the approximate mode alone: no bit of it is promised.

Sequences with many rows in a step: their keys and values are gathered out of the pages and attended
by FlashAttention-2 as torch carries it (Dao 2023, arXiv 2307.08691), one varlen call for all of
them, causal from the right end, grouped heads as they are. What that kernel does not take (fp32,
the CPU) goes through `scaled_dot_product_attention`, a sequence at a time.
Sequences with few rows keep our split decode kernel on a GPU: torch has no stable call that reads
pages, and a CUDA graph needs shapes that do not change.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from tpdet.kernels import ops
from tpdet.kernels.inputs.paged_batch import PagedBatch, PagedSequence
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.kernels.order import PAGE_TOKENS

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Gathered:
    """Sequences whose keys are gathered, as one varlen batch of T keys, on the device.

    `rows` [R] int64: their rows of the step; `pages`, `places` [T] int64: where each key lies;
    `row_ends`, `key_ends` [B + 1] int32: cumulative counts; the most of either in a sequence.
    """

    sequences: tuple[PagedSequence, ...]
    rows: torch.Tensor
    pages: torch.Tensor
    places: torch.Tensor
    row_ends: torch.Tensor
    key_ends: torch.Tensor
    most_rows: int
    most_keys: int


def gather_plan(batch: PagedBatch, device: torch.device) -> Gathered | None:
    """What a step gathers; None where every row goes through the split decode kernel."""
    chosen = tuple(s for s in batch.sequences if device.type == "cpu" or s.count > SHORT_TOKENS)
    if not chosen:
        return None
    rows = torch.cat([torch.arange(s.first_row, s.first_row + s.count) for s in chosen])
    slots = torch.cat([_slots(s) for s in chosen])
    counts = torch.tensor([s.count for s in chosen])
    lengths = torch.tensor([s.length for s in chosen])
    host = torch.cat([rows, slots // PAGE_TOKENS, slots % PAGE_TOKENS])
    ends = torch.cat([_ends(counts), _ends(lengths)]).int()
    if device.type != "cpu":
        host = host.pin_memory().to(device, non_blocking=True)
        ends = ends.pin_memory().to(device, non_blocking=True)
    row_M, page_T, place_T = host.split([len(rows), len(slots), len(slots)])
    row_ends, key_ends = ends.split(len(chosen) + 1)
    return Gathered(
        chosen, row_M, page_T, place_T, row_ends, key_ends, int(counts.max()), int(lengths.max())
    )


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None,
    plan: Gathered | None,
) -> torch.Tensor:
    """q [M, Hq, D] over pages [P, Hkv, 256, D] -> [M, Hq, D], as `ops.paged_attention` has it.

    plan: `gather_plan` of this batch, which all layers share.
    """
    if plan is None:
        return ops.paged_attention(q, k_pages, v_pages, batch, window)
    flash = q.device.type == "cuda" and q.dtype in _HALF
    attend = _flash if flash else _one_by_one
    whole = len(plan.rows) == len(q)
    mine = attend(q if whole else q[plan.rows], k_pages, v_pages, window, plan)
    if whole:
        return mine
    out = torch.zeros_like(q)
    if batch.short.shape[0]:
        out = ops.paged_attention(
            q, k_pages, v_pages, replace(batch, blocks=batch.blocks[:0]), window
        )
    out[plan.rows] = mine
    return out


def _flash(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    window: int | None,
    plan: Gathered,
) -> torch.Tensor:
    """The plan's rows q [R, Hq, D] in one call; a causal mask is aligned to the last key."""
    keys = k_pages[plan.pages, :, plan.places]
    values = v_pages[plan.pages, :, plan.places]
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q.contiguous(),
        keys,
        values,
        plan.row_ends,
        plan.key_ends,
        plan.most_rows,
        plan.most_keys,
        0.0,
        True,
        False,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
    )[0]
    return found


def _one_by_one(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    window: int | None,
    plan: Gathered,
) -> torch.Tensor:
    """The plan's rows q [R, Hq, D], a sequence at a time."""
    parts = []
    rows = q.split([sequence.count for sequence in plan.sequences])
    lengths = [sequence.length for sequence in plan.sequences]
    pages, places = plan.pages.split(lengths), plan.places.split(lengths)
    for sequence, mine, page, place in zip(plan.sequences, rows, pages, places, strict=True):
        key = torch.arange(sequence.length, device=q.device)
        position = key[sequence.start :, None]
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        found = scaled_dot_product_attention(
            mine.transpose(0, 1)[None],
            k_pages[page, :, place].transpose(0, 1)[None],
            v_pages[page, :, place].transpose(0, 1)[None],
            attn_mask=seen,
            enable_gqa=True,
        )
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


def _slots(sequence: PagedSequence) -> torch.Tensor:
    """256 * page + place of each key of a sequence, int64."""
    pages = torch.tensor(sequence.pages) * PAGE_TOKENS
    return (pages[:, None] + torch.arange(PAGE_TOKENS)).flatten()[: sequence.length]


def _ends(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
