"""Which rows of a step belong to which sequence, and on which pages their keys and values lie."""

from dataclasses import dataclass

import torch

from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS

BLOCK_TOKENS = 128  # the rows of longer ones are dealt out in blocks of so many tokens
_ALIGNED = 4  # int32 values in 16 bytes


@dataclass(frozen=True)
class PagedSequence:
    """One sequence's rows in a step.

    Its `count` rows begin at row `first_row` and stand at positions `start`, `start + 1`, ...;
    `pages[i]` holds positions 256 * i to 256 * i + 255. slot: where its linear layers' states lie
    (-1: the model has none); standing: the chunk that they stand for, the first row's or the one
    before; drafts: whether rows may be taken back, so that the states must not go past the first
    row's chunk. snapshots: (chunk, place) of each chunk at whose start the states are to be kept,
    and where among `LinearState.boundary`; those of chunks that begin in other rows are another's.
    """

    first_row: int
    count: int
    start: int
    pages: tuple[int, ...]
    slot: int = -1
    standing: int = 0
    drafts: bool = False
    snapshots: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.pages) * PAGE_TOKENS < self.start + self.count:
            raise ValueError(
                f"{len(self.pages)} pages do not hold positions up to {self.start + self.count - 1}"
            )

    @property
    def length(self) -> int:
        """Positions that hold keys once this step's are stored."""
        return self.start + self.count

    @property
    def kept(self) -> dict[int, int]:
        """The places of the snapshots of chunks that begin in its rows, by chunk."""
        begins = range(self.start, self.length)
        return {chunk: to for chunk, to in self.snapshots if chunk * CHUNK_TOKENS in begins}


@dataclass(frozen=True)
class PagedBatch:
    """A step's sequences, in the order of their rows, with what a device needs of them.

    On the CPU only `sequences` is read. On a GPU the integer tensors, which one copy a step brings
    there, hold the same and the work lists of its kernels:

    - `positions` [M] int64; `slots` [M] int64: 256 * page + place in the page of each row;
    - `tables` [B, longest] int32: sequence b's pages, padded with -1;
    - `rows` [B, 3] int32: first row, count and start of each sequence;
    - `blocks` [T, 2] int32: sequence and first token of each 128 tokens of the long sequences,
      those with most keys first;
    - `splits` [N, 2] int32: sequence and split of each 256 keys of the short sequences;
    - `short` [S, 2] int32: each short sequence and its first row of `splits`;
    - `states` [B, 4] int32: each sequence's slot, standing, whether it has drafts, and its first
      row of `pieces`; with `pieces` and `runs` it is empty where no sequence has a slot;
    - `pieces` [T, 3] int32: sequence and chunk of each chunk of 64 positions in which rows lie,
      those of `runs` first, and where the states at its start are kept as a snapshot (-1: nowhere);
    - `runs` [R] int32: the sequences with more than one row, those with most rows first.

    A sequence is short when it has at most `short_tokens` rows in this step: its splits are
    attended in parallel and merged afterwards. `short_rows` is the most that one has.
    """

    sequences: tuple[PagedSequence, ...]
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    blocks: torch.Tensor
    splits: torch.Tensor
    short: torch.Tensor
    states: torch.Tensor
    pieces: torch.Tensor
    runs: torch.Tensor
    short_rows: int

    @property
    def row_count(self) -> int:
        """Rows of the step, M."""
        return self.positions.shape[0]


def make_batch(
    sequences: tuple[PagedSequence, ...],
    device: torch.device | str = "cpu",
    short_tokens: int = SHORT_TOKENS,
) -> PagedBatch:
    """The batch of `sequences`, whose rows follow each other without gaps; one copy to `device`.

    `short_tokens` chooses how a GPU shares out the work, never a bit. Raises ValueError when rows
    are left out or overlap.
    """
    positions: list[int] = []
    slots: list[int] = []
    for sequence in sequences:
        if sequence.first_row != len(positions):
            raise ValueError(f"a sequence begins at row {sequence.first_row}, not {len(positions)}")
        positions += range(sequence.start, sequence.length)
        slots += _slots(sequence)
    widest = max((len(sequence.pages) for sequence in sequences), default=0)
    blocks, splits, short = _work(sequences, short_tokens)
    states, pieces, runs = _state_work(sequences)
    positions_M, slots_M, tables, rows, *lists = _pack(
        (positions, slots),
        (
            ([v for s in sequences for v in (*s.pages, *[-1] * (widest - len(s.pages)))], widest),
            ([v for s in sequences for v in (s.first_row, s.count, s.start)], 3),
            ([v for pair in blocks for v in pair], 2),
            ([v for pair in splits for v in pair], 2),
            ([v for pair in short for v in pair], 2),
            ([v for fields in states for v in fields], 4),
            ([v for piece in pieces for v in piece], 3),
            (runs, 1),
        ),
        device,
    )
    short_rows = max((sequences[index].count for index, _ in short), default=0)
    block_list, split_list, short_list, state_list, piece_list, run_list = lists
    return PagedBatch(
        sequences,
        positions_M,
        slots_M,
        tables,
        rows,
        block_list,
        split_list,
        short_list,
        state_list,
        piece_list,
        run_list.view(-1),
        short_rows,
    )


def _slots(sequence: PagedSequence) -> list[int]:
    """256 * page + place in the page of each of a sequence's rows."""
    slots: list[int] = []
    position = sequence.start
    while position < sequence.length:
        page, place = divmod(position, PAGE_TOKENS)
        count = min(PAGE_TOKENS - place, sequence.length - position)
        first = sequence.pages[page] * PAGE_TOKENS + place
        slots += range(first, first + count)
        position += count
    return slots


_Pairs = list[tuple[int, int]]


def _work(sequences: tuple[PagedSequence, ...], short_tokens: int) -> tuple[_Pairs, _Pairs, _Pairs]:
    """`blocks`, `splits` and `short` of a batch."""
    blocks: _Pairs = []
    splits: _Pairs = []
    short: _Pairs = []
    for index, sequence in enumerate(sequences):
        if sequence.count > short_tokens:
            blocks += [(index, first) for first in range(0, sequence.count, BLOCK_TOKENS)]
        elif sequence.count:
            short.append((index, len(splits)))
            splits += [(index, split) for split in range(-(-sequence.length // PAGE_TOKENS))]
    blocks.sort(key=lambda block: (-sequences[block[0]].start - block[1], block))
    return blocks, splits, short


def _state_work(
    sequences: tuple[PagedSequence, ...],
) -> tuple[list[tuple[int, ...]], list[tuple[int, int, int]], list[int]]:
    """`states`, `pieces` and `runs` of a batch."""
    if all(sequence.slot < 0 for sequence in sequences):
        return [], [], []
    states: list[tuple[int, ...]] = [()] * len(sequences)
    pieces: list[tuple[int, int, int]] = []
    ordered = sorted(enumerate(sequences), key=lambda each: -each[1].count)
    for index, row in ordered:
        states[index] = row.slot, row.standing, int(row.drafts), len(pieces)
        chunks, kept = range(row.start // CHUNK_TOKENS, -(-row.length // CHUNK_TOKENS)), row.kept
        pieces += [(index, chunk, kept.get(chunk, -1)) for chunk in chunks if row.count]
    return states, pieces, [index for index, row in ordered if row.count > 1]


def _pack(
    wide: tuple[list[int], ...],
    narrow: tuple[tuple[list[int], int], ...],
    device: torch.device | str,
) -> list[torch.Tensor]:
    """int64 vectors and int32 matrices (values, width) as views of one buffer, copied once.

    Each begins at a multiple of 16 bytes: compiled kernels are specialised on that.
    """
    parts: list[torch.Tensor] = []
    spans: list[tuple[int, int]] = []
    lists = [(torch.tensor(v, dtype=torch.int64).view(torch.int32)) for v in wide]
    lists += [torch.tensor(values, dtype=torch.int32) for values, _ in narrow]
    begin = 0
    for part in lists:
        spans.append((begin, begin + part.numel()))
        padding = -part.numel() % _ALIGNED
        parts += [part, torch.zeros(padding, dtype=torch.int32)]
        begin += part.numel() + padding
    packed = torch.cat(parts)
    if torch.device(device).type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    views = [packed[first:last] for first, last in spans]
    vectors = [view.view(torch.int64) for view in views[: len(wide)]]
    widths = [width for _, width in narrow]
    return vectors + [
        view.view(-1, width) if view.numel() else view.new_empty(0, width)
        for view, width in zip(views[len(wide) :], widths, strict=True)
    ]
