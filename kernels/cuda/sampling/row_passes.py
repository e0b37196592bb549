"""How the last passes over rows of logits are launched: the answers, and what goes to the host."""

import torch
import triton

from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.sampling.filter_top import STATE
from tpdet.kernels.cuda.sampling.row_answers import answer_rows, pack_rows, weigh_rows
from tpdet.kernels.cuda.sampling.row_scan import FIELDS
from tpdet.kernels.inputs.sampled_rows import Packed, RowWeights
from tpdet.kernels.inputs.vocabulary_shard import Shard

_BLOCK = 2048


def weighed_answers(
    logits: torch.Tensor,
    copies: torch.Tensor,
    table: torch.Tensor,
    arrivals: torch.Tensor,
    peaks: torch.Tensor,
    found: tuple[torch.Tensor, torch.Tensor] | None,
    width: int,
    shard: Shard,
    random: bool,
) -> RowWeights:
    """Mass, sample and answer of R rows; `arrivals` int32 [R] are zero before.

    `random`: whether any row is; `peaks` int64 [parts or ranks, R, 2]; `found` of
    `find_bounds`, None without filtered rows.
    """
    peak_parts, rows = peaks.shape[:2]
    device, whole = logits.device, shard.gather is None
    grid, span, block = grid_of(rows, width)
    parts_of = torch.empty(grid[1], rows, 2, dtype=torch.int64, device=device)
    gathered = torch.empty(rows, 3, dtype=torch.int64, device=device)
    answers = torch.empty(4, rows, dtype=torch.float64, device=device)
    maximum = torch.empty(rows, dtype=torch.float32, device=device)
    peak_width = triton.next_power_of_2(peak_parts)
    bounds, tops = found or (peaks, peaks)
    listed = found is not None and whole
    weigh_rows[grid](
        logits,
        copies,
        table,
        peaks,
        bounds,
        tops,
        parts_of,
        arrivals,
        gathered,
        answers,
        maximum,
        rows,
        width,
        shard.first_id,
        logits.stride(0),
        peak_parts,
        FIELDS,
        span,
        block,
        min(block, 1024),
        peak_width,
        triton.next_power_of_2(grid[1]),
        random,
        whole,
        listed,
        STATE,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(device),
    )
    if shard.gather is not None:
        answer_rows[rows,](
            table,
            peaks,
            shard.gather(gathered),
            answers,
            maximum,
            rows,
            peak_parts,
            FIELDS,
            peak_width,
            num_warps=1,
            enable_fp_fusion=False,
            **dependent_launch(device),
        )
    answers[3].log_()
    return RowWeights(answers, maximum)


def pack_answers(answers: torch.Tensor, share: int, places: torch.Tensor | None = None) -> Packed:
    """Rows of `RowWeights.answers`: fp64 [ranks, >= 4 * share], each rank's at its beginning.

    places int64 [R]: where the rows stand among all ranks' shares; None: one rank's, in order.
    """
    rows = share if places is None else len(places)
    tokens, fit, logprobs = (
        torch.empty(rows, dtype=kind, device=answers.device)
        for kind in (torch.int64, torch.bool, torch.float32)
    )
    packed = torch.empty(rows, 3, dtype=torch.float64, device=answers.device)
    pack_rows[triton.cdiv(rows, 128),](
        answers,
        tokens if places is None else places,
        tokens,
        fit,
        logprobs,
        packed,
        rows,
        share,
        answers.stride(0),
        places is not None,
        128,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(answers.device),
    )
    return tokens, logprobs, fit, packed


def grid_of(rows: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Grid, span and block; at least one part, which may be all padding."""
    span = max(_span(rows, width), triton.next_power_of_2(triton.cdiv(width, 1024)))
    return (rows, max(1, triton.cdiv(width, span))), span, min(span, _BLOCK)


def _span(rows: int, width: int) -> int:
    """Columns a program takes: the whole GPU for one row, longer runs for many."""
    for span in (8192, 4096, 2048):
        if rows * width >= span * 1024:
            return span
    return 1024
