"""Tokens and log-probabilities of a step's rows, on the GPU, without waiting for it.

    table (one copy from the host)  ->  copies of rows with bias or penalties  ->  `scan_peaks`
      ->  bounds of filtered rows  ->  `weigh_rows`  ->  torch.log  ->  `pack_rows`

Greedy and random rows take four launches, top-k and top-p six more, however many rows.
Over a sharded vocabulary the peaks, scores and masses of all ranks are gathered, a few integers a
row; rows with top-k or top-p are gathered whole, and every rank finds their bounds.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.sampling.answer_launches import (
    ScannedRows,
    grid_of,
    lanes_for,
    pack_answers,
    weighed_answers,
)
from tpdet.kernels.cuda.sampling.filter_bounds import FilteredRows, find_bounds
from tpdet.kernels.cuda.sampling.penalties import penalise, to_device
from tpdet.kernels.cuda.sampling.row_peaks import scan_groups, scan_peaks
from tpdet.kernels.cuda.sampling.row_table import (
    PEAK_FIELDS,
    ROW_FIELDS,
    given_table,
    row_table,
)
from tpdet.kernels.cuda.sampling.sort_keys import ids_of_keys, top_keys, values_of_keys
from tpdet.kernels.exact.thresholds import check_vocabulary
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.sampled_rows import RowWeights, SampledRows, packed_samples
from tpdet.kernels.inputs.vocabulary_shard import Shard

__all__ = ["pack_answers", "sample_rows", "score_tokens", "top_of_rows", "weigh_samples"]

_GROUPS = 4096


def sample_rows(logits: torch.Tensor, params: Sequence[RowParams], shard: Shard) -> SampledRows:
    """One token a row: fp32 [R, W] and R params, R > 0. Raises ValueError when V is over 2^22."""
    return packed_samples(weigh_samples(logits, params, shard), pack_answers)


def weigh_samples(logits: torch.Tensor, params: Sequence[RowParams], shard: Shard) -> RowWeights:
    """`sample_rows` before the last subtraction. Raises as it does."""
    logits = _fit(logits, shard)
    vocabulary, width = shard.vocab_size, shard.width(logits.shape[1])
    changed: list[int] = []
    filtered, random = np.empty(0, np.int64), False
    if not isinstance(params, PlainRows) and _all_greedy(params):
        held = _greedy_table(len(params), vocabulary, logits.device)
    else:
        plain = params
        if not isinstance(plain, PlainRows):
            plain = PlainRows.of(params)
            changed = [row for row, how in enumerate(params) if how.changes_logits]
        numbers, filtered, random = row_table(plain, changed, vocabulary)
        # Slots stand behind the table, where they are aligned: the alignment is compiled in.
        parts = [numbers, filtered, np.array(changed, np.int64)]
        held = to_device(np.concatenate(parts), torch.int64, logits.device)
    table = held[: len(params) * ROW_FIELDS.value]
    slots = held[len(table) : len(table) + len(filtered)]
    copies = logits
    if changed:
        at = held[len(table) + len(filtered) :]
        copies = logits[at, :width] + 0.0
        penalise(copies, [params[row] for row in changed], shard.first_id)
    whole = shard.gather is None
    scanned, groups = scan_rows(logits, copies, table, shard, len(slots) > 0 and whole)
    found = None
    if len(slots):
        mine = logits
        if not whole:
            mine = _filtered_rows(logits, copies, slots, changed, filtered, shard)
            groups = _groups(mine)
        given = FilteredRows(mine, copies, table, scanned.peaks, slots)
        found = find_bounds(given, groups, vocabulary, not whole)
    return weighed_answers(scanned, found, shard, random)


def sample_by_table(
    logits: torch.Tensor, table: torch.Tensor, slots: torch.Tensor | None, shard: Shard
) -> SampledRows:
    """One token a row by a table that is on the device: fp32 [R, V], int64 [R * ROW_FIELDS].

    No row has a copy. slots: the filtered rows int64 [F], F > 0, each at the place that the table
    names, and perhaps again; None: there are none.
    """
    logits = _fit(logits, shard)
    scanned, groups = scan_rows(logits, logits, table, shard, slots is not None)
    found = None
    if slots is not None:
        given = FilteredRows(logits, logits, table, scanned.peaks, slots)
        found = find_bounds(given, groups, shard.vocab_size, False)
    return packed_samples(weighed_answers(scanned, found, shard, True), pack_answers)


def score_tokens(logits: torch.Tensor, tokens: Sequence[int], shard: Shard) -> SampledRows:
    """Log-probabilities of given tokens: fp32 [T, W] and T ids, T > 0."""
    logits = _fit(logits, shard)
    table = to_device(given_table(tokens), torch.int64, logits.device)
    scanned, _ = scan_rows(logits, logits, table, shard, False)
    return packed_samples(weighed_answers(scanned, None, shard, False), pack_answers)


def top_of_rows(
    logits: torch.Tensor, rows: Sequence[int], count: int, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest of some rows, best first: ids int64 and logits fp32 [len(rows), count]."""
    logits = _fit(logits, shard)
    count = min(count, shard.vocab_size)
    wanted = logits[to_device(rows, torch.int64, logits.device)]
    keys = top_keys(wanted[:, : shard.width(logits.shape[1])], count, shard.first_id)
    if shard.gather is not None:
        everyone = shard.gather(keys).permute(1, 0, 2).reshape(len(rows), -1)
        best = torch.sort(everyone, dim=-1, descending=True, stable=True).values
        keys = best[:, :count]
    return ids_of_keys(keys), values_of_keys(keys)


def scan_rows(
    logits: torch.Tensor,
    copies: torch.Tensor,
    table: torch.Tensor,
    shard: Shard,
    grouped: bool,
) -> tuple[ScannedRows, torch.Tensor]:
    """The rows with their peaks: largest sort keys of the logits and of what is sampled from.

    Where `grouped`, also those of groups of this rank's columns: int64 [R, groups].
    """
    rows, width = len(logits), shard.width(logits.shape[1])
    grid, span, block = grid_of(rows, width)
    each = _group_count(width, span) if grouped else 0
    arrivals = torch.empty(rows, dtype=torch.int32, device=logits.device)
    peaks = torch.empty(grid[1], rows, PEAK_FIELDS.value, dtype=torch.int64, device=logits.device)
    groups = peaks
    if grouped:
        groups = torch.empty(rows, grid[1] * each, dtype=torch.int64, device=logits.device)
    scan_peaks[grid](
        logits,
        copies,
        table,
        peaks,
        groups,
        arrivals,
        rows,
        width,
        shard.first_id,
        logits.stride(0),
        span,
        block,
        each,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(logits.device),
    )
    if shard.gather is not None:
        peaks = shard.gather(peaks.amax(0))
    return ScannedRows(logits, copies, table, peaks, arrivals), groups


def _fit(logits: torch.Tensor, shard: Shard) -> torch.Tensor:
    check_vocabulary(shard.vocab_size)
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _all_greedy(params: Sequence[RowParams]) -> bool:
    """Whether one object, over and over, asks for each row's likeliest: a step of greedy rows."""
    how = params[0]
    same = params[-1] is how and params.count(how) == len(params)
    return same and how.temperature == 0.0 and not how.changes_logits


@lru_cache(maxsize=1024)
def _greedy_table(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """`row_table` of rows whose seeds, positions and choices nobody reads, kept on the device."""
    numbers, _, _ = row_table(PlainRows.of([RowParams(0.0, 0, 0)] * rows), [], vocabulary)
    return to_device(numbers, torch.int64, device)


def _group_count(width: int, span: int) -> int:
    """Groups a part of `span` columns has: of 64 columns, of more where a row would have 4,096."""
    return span // max(64, lanes_for(-(-width // _GROUPS)))


def _groups(whole_rows: torch.Tensor) -> torch.Tensor:
    """Largest sort keys of groups of whole rows fp32 [F, V]: int64 [F, groups]."""
    rows, width = whole_rows.shape
    grid, span, block = grid_of(rows, width)
    each = _group_count(width, span)
    groups = torch.empty(rows, grid[1] * each, dtype=torch.int64, device=whole_rows.device)
    scan_groups[grid](
        whole_rows,
        groups,
        width,
        whole_rows.stride(0),
        span,
        block,
        each,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(whole_rows.device),
    )
    return groups


def _filtered_rows(
    logits: torch.Tensor,
    copies: torch.Tensor,
    slots: torch.Tensor,
    changed: list[int],
    filtered: np.ndarray,
    shard: Shard,
) -> torch.Tensor:
    """A shard's filtered rows, or their copies, gathered whole: fp32 [F, V]."""
    mine = logits[slots]
    places = [(i, changed.index(row)) for i, row in enumerate(filtered) if row in changed]
    if places:
        into, out = (
            to_device([i for pair in places for i in pair], torch.int64, logits.device)
            .view(-1, 2)
            .unbind(1)
        )
        mine[into, : copies.shape[1]] = copies[out]
    return shard.whole(mine)
