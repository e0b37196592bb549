"""Tokens and log-probabilities of a step's rows, on the GPU, without waiting for it.

    table (one copy from the host)  ->  copies of rows with bias or penalties  ->  `scan_peaks`
      ->  bounds of filtered rows  ->  `sum_rows`  ->  torch.log  ->  `pack_rows`

Where log-probabilities are of what is sampled from, `write_processed` and a second `sum_rows` stand
before the last one.
Greedy and random rows take four launches, top-k and top-p six more, however many rows.
Over a sharded vocabulary the peaks, scores and masses of all ranks are gathered, a few integers a
row; rows with top-k or top-p are gathered whole, and every rank finds their bounds.

By numbers that stay on the GPU a CUDA graph can sample and move on (`sample_written`):

    numbers  int64 [R * ROW_FIELDS]  the rows' table, then
             int64 [R]               the filtered rows, the first of them again in the room left
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from tpdet.kernels.cuda.sampling.answers import PACKED_BLOCK, PACKED_FIELDS, answers_of, pack_rows
from tpdet.kernels.cuda.sampling.candidates import Bounds
from tpdet.kernels.cuda.sampling.peaks import (
    LogitRows,
    gathered_rows,
    numbers_beside,
    options,
    scan_rows,
)
from tpdet.kernels.cuda.sampling.penalties import penalise, to_device
from tpdet.kernels.cuda.sampling.processed import processed_rows
from tpdet.kernels.cuda.sampling.ranks import ids_of_keys, top_keys, values_of_keys
from tpdet.kernels.cuda.sampling.search import find_bounds
from tpdet.kernels.cuda.sampling.table import POSITION, ROW_FIELDS, row_table, table_of_tokens
from tpdet.kernels.exact.thresholds import check_vocabulary
from tpdet.kernels.inputs.plain_rows import WORDS, PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.sampled_rows import PackedRows, RowAnswers, SampledRows, packed_samples
from tpdet.kernels.inputs.vocabulary_shard import Shard


def sample_rows(logits: torch.Tensor, params: Sequence[RowParams], shard: Shard) -> SampledRows:
    """One token a row: fp32 [R, W] and R params, R > 0. Raises ValueError when V is over 2^22."""
    return packed_samples(sample_answers(logits, params, shard), pack_answers)


def sample_answers(logits: torch.Tensor, params: Sequence[RowParams], shard: Shard) -> RowAnswers:
    """`sample_rows` before the last subtraction. Raises as it does."""
    rows, bounds, random = _scan(logits, params, shard)
    return answers_of(rows, bounds, shard, random)


def sample_processed(
    logits: torch.Tensor, params: Sequence[RowParams], shard: Shard
) -> tuple[RowAnswers, torch.Tensor]:
    """`sample_answers` with log-probabilities of the rows as they are before the noise.

    Also these rows, fp32 [R, W], in which an id that a filter or a mask removed has -inf.
    """
    rows, bounds, random = _scan(logits, params, shard)
    sampled = answers_of(rows, bounds, shard, random)
    processed = processed_rows(rows, bounds, sampled, shard)
    scored = answers_of(processed, None, shard, False)
    scored.answers[:2] = sampled.answers[:2]  # fit and token: those of the logits as they are
    return scored, processed.logits


def _scan(
    logits: torch.Tensor, params: Sequence[RowParams], shard: Shard
) -> tuple[LogitRows, Bounds | None, bool]:
    """The rows with their maxima, what filters say of them, and whether any row draws noise."""
    logits = _fit(logits, shard)
    changed: list[int] = []
    filtered, random = np.empty(0, np.int64), False
    if not isinstance(params, PlainRows) and _all_greedy(params):
        numbers = _greedy_table(len(params), shard.vocab_size, logits.device)
    else:
        plain = params
        if not isinstance(plain, PlainRows):
            plain = PlainRows.of(params)
            changed = [row for row, how in enumerate(params) if how.changes_logits]
        fields, filtered, random = row_table(plain, changed, shard.vocab_size)
        # Slots stand behind the table, where they are aligned: the alignment is compiled in.
        parts = [fields, filtered, np.array(changed, np.int64)]
        numbers = to_device(np.concatenate(parts), torch.int64, logits.device)
        if plain.moved is not None:
            move_on(numbers, plain.moved)
    table = numbers[: len(params) * ROW_FIELDS.value]
    slots = numbers[len(table) : len(table) + len(filtered)] if len(filtered) else None
    copies = logits
    if changed:
        at = numbers[len(table) + len(filtered) :]
        copies = logits[at, : shard.width(logits.shape[1])] + 0.0
        penalise(copies, [params[row] for row in changed], shard.first_id)
    rows = scan_rows(logits, copies, table, slots, shard)
    bounds = None
    if slots is not None:
        whole, filtered_rows = shard.gather is None, rows
        if not whole:
            own = _filtered_rows(rows, changed, filtered)
            filtered_rows = gathered_rows(rows, shard.whole(own))
        bounds = find_bounds(filtered_rows, shard.vocab_size, not whole)
    return rows, bounds, random


def score_tokens(logits: torch.Tensor, tokens: Sequence[int], shard: Shard) -> SampledRows:
    """Log-probabilities of tokens: fp32 [T, W] and T ids, T > 0."""
    logits = _fit(logits, shard)
    table = to_device(table_of_tokens(tokens), torch.int64, logits.device)
    rows = scan_rows(logits, logits, table, None, shard)
    return packed_samples(answers_of(rows, None, shard, False), pack_answers)


def pack_answers(
    answers: torch.Tensor, share: int, places: torch.Tensor | None = None
) -> PackedRows:
    """Rows of `RowAnswers.answers`: fp64 [ranks, >= 4 * share], each rank's at its beginning.

    places int64 [R]: where the rows stand among all ranks' shares; None: one rank's, in order.
    """
    rows, placed = share if places is None else len(places), places is not None
    into = PackedRows(
        numbers_beside(answers, rows),
        numbers_beside(answers, rows, dtype=torch.float32),
        numbers_beside(answers, rows, dtype=torch.bool),
        numbers_beside(answers, rows, PACKED_FIELDS.value, dtype=torch.float64),
    )
    of = answers, into.tokens if places is None else places, into, rows, share, answers.stride(0)
    pack_rows[-(-rows // PACKED_BLOCK.value),](*of, placed, **options(answers.device, 4))
    return into


def top_of_rows(
    logits: torch.Tensor, rows: Sequence[int], count: int, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest of some rows, best first: ids int64 and logits fp32 [len(rows), count]."""
    logits = _fit(logits, shard)
    count = min(count, shard.vocab_size)
    chosen = logits[to_device(rows, torch.int64, logits.device)]
    keys = top_keys(chosen[:, : shard.width(logits.shape[1])], count, shard.first_id)
    if shard.gather is not None:
        everyone = shard.gather(keys).permute(1, 0, 2).reshape(len(rows), -1)
        best = torch.sort(everyone, dim=-1, descending=True, stable=True).values
        keys = best[:, :count]
    return ids_of_keys(keys), values_of_keys(keys)


def write_rows(rows: PlainRows, vocabulary: int, numbers: np.ndarray) -> bool:
    """Write rows to int64 [R * WORDS], R >= len(rows) > 0; the others are greedy pads.

    Returns whether any row has top-k or top-p.
    """
    room = len(numbers) // WORDS
    end = room * ROW_FIELDS.value
    table, slots = numbers[:end].reshape(room, -1), numbers[end:]
    fields, filtered, _ = row_table(rows, [], vocabulary)
    table[: len(rows)] = fields.reshape(len(rows), -1)
    table[len(rows) :] = _pad(vocabulary)
    slots[:] = filtered[0] if len(filtered) else 0
    slots[: len(filtered)] = filtered
    return len(filtered) > 0


def sample_written(
    logits: torch.Tensor, numbers: torch.Tensor, filtered: bool, shard: Shard
) -> SampledRows:
    """One token a whole row: fp32 [R, W], what `write_rows` wrote, and what it said of filters."""
    logits = _fit(logits, shard)
    table = numbers[: len(logits) * ROW_FIELDS.value]
    slots = numbers[len(table) :] if filtered else None
    rows = scan_rows(logits, logits, table, slots, shard)
    bounds = find_bounds(rows, shard.vocab_size, False) if filtered else None
    return packed_samples(answers_of(rows, bounds, shard, True), pack_answers)


def move_on(numbers: torch.Tensor, by: torch.Tensor) -> None:
    """Add int64 [R] to the positions of written rows."""
    table = numbers[: len(by) * ROW_FIELDS.value].view(len(by), ROW_FIELDS.value)
    table[:, POSITION.value].add_(by)


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
    return to_device(np.tile(_pad(vocabulary), rows), torch.int64, device)


@lru_cache
def _pad(vocabulary: int) -> np.ndarray:
    """The fields of a greedy row."""
    return row_table(PlainRows.of([RowParams(0.0, 0, 0)]), [], vocabulary)[0]


def _filtered_rows(rows: LogitRows, changed: list[int], filtered: np.ndarray) -> torch.Tensor:
    """A shard's columns of filtered rows, or of their copies: fp32 [F, >= W]."""
    own = rows.logits[rows.slots]
    pairs = [(i, changed.index(row)) for i, row in enumerate(filtered) if row in changed]
    if pairs:
        flat = [i for pair in pairs for i in pair]
        into, out = to_device(flat, torch.int64, own.device).view(-1, 2).unbind(1)
        own[into, : rows.copies.shape[1]] = rows.copies[out]
    return own
