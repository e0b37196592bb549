"""A step's rows in two halves, so that one's exchange runs under the other's products."""

import torch

from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS, PagedBatch, PagedSequence, make_batch

MICRO_BATCH_ROWS = 2048
"""From so many rows on a step runs in halves."""


def micro_batches(
    sequences: tuple[PagedSequence, ...], device: torch.device, exchanges_aside: bool
) -> list[PagedBatch]:
    """One batch, or two halves of a step of many rows whose exchanges can run aside."""
    rows = sum(sequence.count for sequence in sequences)
    cut = exchanges_aside and first_half(rows) < rows
    return [make_batch(half, device) for half in (cut_in_two(sequences) if cut else [sequences])]


def first_half(rows: int) -> int:
    """Rows of the first half of a step that runs in halves; all, of a step of few rows."""
    return _middle(rows) if rows >= MICRO_BATCH_ROWS else rows


def _middle(rows: int) -> int:
    middle = -(-rows // (2 * BLOCK_TOKENS)) * BLOCK_TOKENS
    return middle if middle < rows else rows // 2


def cut_in_two(sequences: tuple[PagedSequence, ...]) -> list[tuple[PagedSequence, ...]]:
    """Sequences whose rows follow each other -> the same rows as two batches, each from row 0.

    A sequence may be cut: its later rows then stand in the second batch, as a chunk of a prompt
    would. Both halves have rows if there are two.
    """
    rows = sum(sequence.count for sequence in sequences)
    middle = _middle(rows)
    halves: list[list[PagedSequence]] = [[], []]
    for sequence in sequences:
        early = min(sequence.count, max(0, middle - sequence.first_row))
        if early:
            halves[0].append(
                PagedSequence(sequence.first_row, early, sequence.start, sequence.pages)
            )
        if early < sequence.count:
            halves[1].append(
                PagedSequence(
                    sequence.first_row + early - middle,
                    sequence.count - early,
                    sequence.start + early,
                    sequence.pages,
                )
            )
    return [tuple(half) for half in halves if half]
