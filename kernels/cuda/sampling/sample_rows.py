"""Tokens and log-probabilities of a step's rows, on the GPU, without waiting for it.

    table (one copy from the host)  ->  copies of rows with bias or penalties  ->  `scan_peaks`
      ->  bounds of filtered rows  ->  `weigh_rows`  ->  torch.log  ->  `pack_rows`

Greedy and random rows take four launches, top-k and top-p six more, however many rows.
Over a sharded vocabulary the peaks, scores and masses of all ranks are gathered, a few integers a
row; rows with top-k or top-p are gathered whole, and every rank finds their bounds.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.sampling.filter_rows import find_bounds
from tpdet.kernels.cuda.sampling.penalties import penalise, to_device
from tpdet.kernels.cuda.sampling.row_passes import grid_of, pack_answers, weighed_answers
from tpdet.kernels.cuda.sampling.row_scan import FIELDS, scan_groups, scan_peaks
from tpdet.kernels.cuda.sampling.sort_keys import id_of, top_orders
from tpdet.kernels.exact.thresholds import (
    KEEP_ALL,
    check_vocabulary,
    min_p_distance,
    top_p_numerator,
)
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.sampled_rows import RowWeights, SampledRows, packed_samples
from tpdet.kernels.inputs.vocabulary_shard import Shard

__all__ = ["pack_answers", "sample_rows", "score_tokens", "top_of_rows", "weigh_samples"]

_GREEDY, _RANDOM, _GIVEN = 0, 1, 2
_GROUPS = 4096


def sample_rows(logits: torch.Tensor, params: Sequence[RowParams], shard: Shard) -> SampledRows:
    """One token a row: fp32 [R, W] and R params, R > 0. Raises ValueError when V is over 2^22."""
    return packed_samples(weigh_samples(logits, params, shard), pack_answers)


def weigh_samples(logits: torch.Tensor, params: Sequence[RowParams], shard: Shard) -> RowWeights:
    """`sample_rows` before the last subtraction. Raises as it does."""
    logits = _fit(logits, shard)
    vocabulary, width = shard.vocab_size, shard.width(logits.shape[1])
    if _all_likeliest(params):
        changed: list[int] = []
        filtered: list[int] = []
        held = _likeliest_table(len(params), vocabulary, logits.device)
    else:
        changed = [row for row, how in enumerate(params) if how.changes_logits]
        filtered = [row for row, how in enumerate(params) if _way_of(how, vocabulary).filters]
        numbers = _row_table(params, changed, filtered, vocabulary)
        # Slots stand behind the table, where they are aligned: the alignment is compiled in.
        held = to_device([*numbers, *filtered, *changed], torch.int64, logits.device)
    table = held[: len(params) * FIELDS]
    slots = held[len(table) : len(table) + len(filtered)]
    copies = logits
    if changed:
        at = held[len(table) + len(filtered) :]
        copies = logits[at, :width] + 0.0
        penalise(copies, [params[row] for row in changed], shard.first_id)
    whole = shard.gather is None
    arrivals = torch.empty(len(params), dtype=torch.int32, device=logits.device)
    peaks, groups = _peaks(
        logits, copies, table, arrivals, len(params), width, shard, bool(filtered) and whole
    )
    found = None
    if filtered:
        mine = logits
        if not whole:
            mine = _filtered_rows(logits, copies, slots, changed, filtered, shard)
            groups = _groups(mine)
        found = find_bounds(mine, copies, table, peaks, slots, groups, vocabulary, not whole)
    random = any(how.temperature != 0.0 for how in params)
    return weighed_answers(logits, copies, table, arrivals, peaks, found, width, shard, random)


def score_tokens(logits: torch.Tensor, tokens: Sequence[int], shard: Shard) -> SampledRows:
    """Log-probabilities of given tokens: fp32 [T, W] and T ids, T > 0."""
    logits = _fit(logits, shard)
    width = shard.width(logits.shape[1])
    numbers = [
        number for token in tokens for number in (0, 0, 0, 0, 0, _GIVEN, 0, 0, 0, -1, token, 0)
    ]
    table = to_device(numbers, torch.int64, logits.device)
    arrivals = torch.empty(len(tokens), dtype=torch.int32, device=logits.device)
    peaks, _ = _peaks(logits, logits, table, arrivals, len(tokens), width, shard, False)
    found = weighed_answers(logits, logits, table, arrivals, peaks, None, width, shard, False)
    return packed_samples(found, pack_answers)


def top_of_rows(
    logits: torch.Tensor, rows: Sequence[int], count: int, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest of some rows, best first: ids int64 and logits fp32 [len(rows), count]."""
    logits = _fit(logits, shard)
    count = min(count, shard.vocab_size)
    wanted = logits[to_device(rows, torch.int64, logits.device)]
    orders = top_orders(wanted[:, : shard.width(logits.shape[1])], count, shard.first_id)
    if shard.gather is not None:
        everyone = shard.gather(orders).permute(1, 0, 2).reshape(len(rows), -1)
        best = torch.sort(everyone, dim=-1, descending=True, stable=True).values
        orders = best[:, :count]
    key = (orders >> 22).to(torch.int32)
    return id_of(orders), (key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _fit(logits: torch.Tensor, shard: Shard) -> torch.Tensor:
    check_vocabulary(shard.vocab_size)
    return logits if logits.stride(1) == 1 else logits.contiguous()


class _Way(NamedTuple):
    """What a row's table says of its parameters: T's bits to bits of ln(min_p), in its order."""

    numbers: tuple[int, ...]
    filters: bool


@lru_cache(maxsize=4096)
def _way(temperature: float, top_k: int, top_p: float, min_p: float, vocabulary: int) -> _Way:
    random = temperature != 0.0
    most = min(top_k, vocabulary) if random and top_k > 0 else vocabulary
    share = top_p_numerator(top_p) if random else KEEP_ALL
    by_min_p = random and min_p > 0.0
    distance = min_p_distance(min_p) if by_min_p else -float("inf")
    kind = _RANDOM if random else _GREEDY
    numbers = (_bits(temperature or 1.0), kind, most, share, _bits(distance))
    return _Way(numbers, most < vocabulary or share < KEEP_ALL)


def _way_of(how: RowParams, vocabulary: int) -> _Way:
    return _way(how.temperature, how.top_k, how.top_p, how.min_p, vocabulary)


def _all_likeliest(params: Sequence[RowParams]) -> bool:
    """Whether one object, over and over, asks for each row's likeliest: a step of greedy rows."""
    how = params[0]
    same = params[-1] is how and params.count(how) == len(params)
    return same and how.temperature == 0.0 and not how.changes_logits


@lru_cache(maxsize=1024)
def _likeliest_table(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """`_row_table` of rows whose seeds, positions and choices nobody reads, kept on the device."""
    numbers = _row_table([RowParams(0.0, 0, 0)] * rows, [], [], vocabulary)
    return to_device(numbers, torch.int64, device)


def _row_table(
    params: Sequence[RowParams], changed: list[int], filtered: list[int], vocabulary: int
) -> list[int]:
    """int64 [R, 12]: two seed words, position, choice, T's bits, kind, top-k, top-p's P, bits of
    ln(min_p), copy (-1: none), slot among filtered rows (-1) or given token, unused."""
    copy = {row: place for place, row in enumerate(changed)}
    slot = {row: place for place, row in enumerate(filtered)}
    numbers: list[int] = []
    for row, how in enumerate(params):
        numbers += (
            how.seed & 0xFFFFFFFF, how.seed >> 32, how.position, how.choice,
            *_way_of(how, vocabulary).numbers, copy.get(row, -1), slot.get(row, -1), 0,
        )  # fmt: skip
    return numbers


def _bits(value: float) -> int:
    """int32 bits of a number rounded to fp32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _group_count(width: int, span: int) -> int:
    """Groups a part of `span` columns has: of 64 columns, of more where a row would have 4,096."""
    return span // max(64, triton.next_power_of_2(triton.cdiv(width, _GROUPS)))


def _peaks(
    logits: torch.Tensor,
    copies: torch.Tensor,
    table: torch.Tensor,
    arrivals: torch.Tensor,
    rows: int,
    width: int,
    shard: Shard,
    grouped: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest orders of the logits and of what is sampled from, and those of groups of the latter.

    int64 [parts or ranks, R, 2], and where `grouped` of this rank's columns [R, groups]. `arrivals`
    int32 [R] are cleared.
    """
    grid, span, block = grid_of(rows, width)
    each = _group_count(width, span) if grouped else 0
    peaks = torch.empty(grid[1], rows, 2, dtype=torch.int64, device=logits.device)
    groups = torch.empty(rows, grid[1] * each, dtype=torch.int64, device=logits.device)
    scan_peaks[grid](
        logits,
        copies,
        table,
        peaks,
        groups if grouped else peaks,
        arrivals,
        rows,
        width,
        shard.first_id,
        logits.stride(0),
        FIELDS,
        span,
        block,
        each,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(logits.device),
    )
    return (peaks if shard.gather is None else shard.gather(peaks.amax(0))), groups


def _groups(whole_rows: torch.Tensor) -> torch.Tensor:
    """Largest orders of groups of whole rows fp32 [F, V]: int64 [F, groups]."""
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
    filtered: list[int],
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
