"""Which rows of a step belong to which sequence, and on which pages their keys and values lie."""

from dataclasses import dataclass

import torch

from tpdet.kernels.order import PAGE_TOKENS


@dataclass(frozen=True)
class PagedSequence:
    """One sequence's rows in a step.

    Its `count` rows begin at row `first_row` and stand at positions `start`, `start + 1`, ...;
    `pages[i]` holds positions 256 * i to 256 * i + 255.
    """

    first_row: int
    count: int
    start: int
    pages: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.pages) * PAGE_TOKENS < self.start + self.count:
            raise ValueError(
                f"{len(self.pages)} pages do not hold positions up to {self.start + self.count - 1}"
            )

    @property
    def length(self) -> int:
        """Positions that hold keys once this step's are stored."""
        return self.start + self.count


@dataclass(frozen=True)
class PagedBatch:
    """A step's sequences, in the order of their rows, with what a device needs of them.

    On the CPU only `sequences` is read. On a GPU the integer tensors, which one copy a step brings
    there, hold the same: `positions` [M] int64; `tables` [B, longest] int32, sequence b's pages
    padded with -1; `rows` [B, 3] int32: first row, count and start of each sequence.
    """

    sequences: tuple[PagedSequence, ...]
    positions: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor

    @property
    def longest(self) -> int:
        """Positions of the longest sequence."""
        return max((sequence.length for sequence in self.sequences), default=0)


def make_batch(
    sequences: tuple[PagedSequence, ...], device: torch.device | str = "cpu"
) -> PagedBatch:
    """The batch of `sequences`, whose rows follow each other without gaps; one copy to `device`.

    Raises ValueError when rows are left out or overlap.
    """
    positions: list[int] = []
    for sequence in sequences:
        if sequence.first_row != len(positions):
            raise ValueError(f"a sequence begins at row {sequence.first_row}, not {len(positions)}")
        positions += range(sequence.start, sequence.length)
    widest = max((len(sequence.pages) for sequence in sequences), default=0)
    tables = [[*s.pages, *[-1] * (widest - len(s.pages))] for s in sequences]
    rows = [[s.first_row, s.count, s.start] for s in sequences]
    flat = positions + [v for row in rows for v in row] + [v for table in tables for v in table]
    packed = torch.tensor(flat, dtype=torch.int64)
    if torch.device(device).type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    first, second = len(positions), len(positions) + 3 * len(sequences)
    return PagedBatch(
        sequences,
        packed[:first],
        packed[second:].view(len(sequences), widest).int(),
        packed[first:second].view(len(sequences), 3).int(),
    )
