"""Cuts a step of many rows into two micro-batches: the exchange of one overlaps the other."""

from dataclasses import replace

import torch

from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS, PagedBatch, PagedSequence, make_batch
from tpdet.kernels.order import CHUNK_TOKENS

MICRO_BATCH_ROWS = 2048
"""A step of this many rows or more runs as two micro-batches."""


def micro_batches(
    sequences: tuple[PagedSequence, ...], device: torch.device, overlaps_exchanges: bool
) -> list[PagedBatch]:
    """One batch, or the two of a step of many rows whose exchanges can overlap."""
    rows = sum(sequence.count for sequence in sequences)
    # A state that drafts leave behind is not the second batch's to move.
    drafts = any(sequence.drafts and sequence.slot >= 0 for sequence in sequences)
    cut = overlaps_exchanges and not drafts and first_micro_batch(rows) < rows
    return [make_batch(each, device) for each in (cut_in_two(sequences) if cut else [sequences])]


def first_micro_batch(rows: int) -> int:
    """Rows of the first of two micro-batches; all rows of a step of few."""
    return _middle(rows) if rows >= MICRO_BATCH_ROWS else rows


def _middle(rows: int) -> int:
    middle = -(-rows // (2 * BLOCK_TOKENS)) * BLOCK_TOKENS
    return middle if middle < rows else rows // 2


def cut_in_two(sequences: tuple[PagedSequence, ...]) -> list[tuple[PagedSequence, ...]]:
    """Sequences whose rows follow each other -> the same rows as two batches, each from row 0.

    A sequence may be cut: its later rows then stand in the second batch, as a chunk of a prompt
    would. Each batch has rows if there are two.
    """
    rows = sum(sequence.count for sequence in sequences)
    middle = _middle(rows)
    parts: list[list[PagedSequence]] = [[], []]
    for sequence in sequences:
        early = min(sequence.count, max(0, middle - sequence.first_row))
        if early:
            parts[0].append(replace(sequence, count=early))
        if early < sequence.count:
            later = replace(
                sequence,
                first_row=sequence.first_row + early - middle,
                count=sequence.count - early,
                start=sequence.start + early,
            )
            if early:
                later = replace(later, standing=(later.start - 1) // CHUNK_TOKENS)
            parts[1].append(later)
    return [tuple(part) for part in parts if part]
