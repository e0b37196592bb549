"""How the last passes over rows of logits are launched: the answers, and what goes to the host."""

from functools import lru_cache
from typing import NamedTuple

import torch

from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.sampling.row_answers import (
    GATHERED_FIELDS,
    PACKED_FIELDS,
    PARTIAL_FIELDS,
    answer_rows,
    pack_rows,
    weigh_rows,
)
from tpdet.kernels.inputs.sampled_rows import Packed, RowWeights
from tpdet.kernels.inputs.vocabulary_shard import Shard

_BLOCK = 2048
_SCORED_BLOCK = 1024
_PACKED_BLOCK = 128


class ScannedRows(NamedTuple):
    """Rows of logits after `scan_peaks`."""

    logits: torch.Tensor
    """fp32 [R, W]."""
    copies: torch.Tensor
    """fp32 [copies, W]: rows after bias and penalties; any tensor where there are none."""
    table: torch.Tensor
    """int64 [R * ROW_FIELDS]: `row_table`."""
    peaks: torch.Tensor
    """int64 [parts or ranks, R, PEAK_FIELDS]."""
    arrivals: torch.Tensor
    """int32 [R], zeros."""


class Bounds(NamedTuple):
    """What the filters found of F filtered rows."""

    bounds: torch.Tensor
    """int64 [F, BOUND_FIELDS]: the smallest kept sort key, and the best score's or ABOVE_ALL."""
    states: torch.Tensor
    """int64 [F, LIST_FIELDS]: `candidate_list`."""


def weighed_answers(
    scanned: ScannedRows, found: Bounds | None, shard: Shard, random: bool
) -> RowWeights:
    """Mass, sample and answer of R rows; found: None without filtered rows.

    random: whether any row is sampled with noise.
    """
    peak_parts, rows = scanned.peaks.shape[:2]
    peak_width = lanes_for(peak_parts)
    device = scanned.logits.device
    gathered = scanned.peaks  # not written where rows are whole
    if shard.gather is not None:
        gathered = torch.empty(rows, GATHERED_FIELDS.value, dtype=torch.int64, device=device)
    answers = torch.empty(4, rows, dtype=torch.float64, device=device)
    maximum = torch.empty(rows, dtype=torch.float32, device=device)
    _weigh(scanned, found, shard, random, gathered, RowWeights(answers, maximum))
    if shard.gather is not None:
        answer_rows[rows,](
            scanned.table,
            scanned.peaks,
            shard.gather(gathered),
            answers,
            maximum,
            rows,
            peak_parts,
            peak_width,
            num_warps=1,
            enable_fp_fusion=False,
            **dependent_launch(device),
        )
    answers[3].log_()
    return RowWeights(answers, maximum)


def _weigh(
    scanned: ScannedRows,
    found: Bounds | None,
    shard: Shard,
    random: bool,
    gathered: torch.Tensor,
    into: RowWeights,
) -> None:
    """Launches `weigh_rows`: the answers of whole rows, or a shard's numbers into `gathered`."""
    logits, copies, table, peaks, arrivals = scanned
    peak_parts, rows = peaks.shape[:2]
    width, whole = shard.width(logits.shape[1]), shard.gather is None
    grid, span, block = grid_of(rows, width)
    partials = torch.empty(
        grid[1], rows, PARTIAL_FIELDS.value, dtype=torch.int64, device=logits.device
    )
    bounds, states = found or (peaks, peaks)
    weigh_rows[grid](
        logits,
        copies,
        table,
        peaks,
        bounds,
        states,
        partials,
        arrivals,
        gathered,
        into.answers,
        into.maximum,
        rows,
        width,
        shard.first_id,
        logits.stride(0),
        peak_parts,
        span,
        block,
        min(block, _SCORED_BLOCK),
        lanes_for(peak_parts),
        lanes_for(grid[1]),
        random,
        whole,
        found is not None and whole,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(logits.device),
    )


def pack_answers(answers: torch.Tensor, share: int, places: torch.Tensor | None = None) -> Packed:
    """Rows of `RowWeights.answers`: fp64 [ranks, >= 4 * share], each rank's at its beginning.

    places int64 [R]: where the rows stand among all ranks' shares; None: one rank's, in order.
    """
    rows = share if places is None else len(places)
    tokens, fit, logprobs = (
        torch.empty(rows, dtype=kind, device=answers.device)
        for kind in (torch.int64, torch.bool, torch.float32)
    )
    packed = torch.empty(rows, PACKED_FIELDS.value, dtype=torch.float64, device=answers.device)
    pack_rows[-(-rows // _PACKED_BLOCK),](
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
        _PACKED_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(answers.device),
    )
    return tokens, logprobs, fit, packed


def lanes_for(count: int) -> int:
    """The least power of two from `count` up. Triton's own functions cost the host some us each."""
    return 1 << (count - 1).bit_length()


@lru_cache(maxsize=1024)
def grid_of(rows: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Grid, span and block; at least one part, which may be all padding."""
    span = max(_span(rows, width), lanes_for(-(-width // 1024)))
    return (rows, max(1, -(-width // span))), span, min(span, _BLOCK)


def _span(rows: int, width: int) -> int:
    """Columns a program takes: the whole GPU for one row, longer runs for many."""
    for span in (8192, 4096, 2048):
        if rows * width >= span * 1024:
            return span
    return 1024
