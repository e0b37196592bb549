"""A step's integers in one buffer of fixed shape, so that a captured graph finds them in place.

The buffer holds int32 words: the ids of the step's rows, then positions, slots, tables and work
lists of one batch or of two (`PagedBatch`). Each part begins at a multiple of 16 bytes, because
kernels are specialised on that. A step is padded up to the shape. A pad row is token 0 at position
0 of no sequence and writes to the scratch page. A pad entry of a list names the table's last
sequence, which has no rows. A row's bits depend on no pad (docs/numerics.md, section 8).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from tpdet.cache.states import boundary_of
from tpdet.control.plan import PlanRows, snapshot_columns
from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS, PagedBatch, PagedSequence
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS

_ALIGNED = 4  # int32 values in 16 bytes
_INT64 = 2  # int32 values of one int64: an id, a position, a slot
_FIRST, _COUNT, START = range(3)
"""Columns of `spans`: a sequence's first row, its number of rows, the first row's position."""
_SEQUENCE, _OFFSET, _KEPT = range(3)
"""Columns of the lists. `_OFFSET` is a row of the sequence in `blocks`, a split of the sequence in
`splits`, the sequence's first entry of `splits` in `short`, and a chunk in `pieces`, which alone
have `_KEPT`: where a snapshot goes."""
_SLOT, _STANDING, _DRAFTS = range(3)
"""Columns of `StepSpans.states`; the buffer has a sequence's first piece behind them."""
_FIRST_PIECE = _DRAFTS + 1
_Buffer = Any  # a tensor, or an array over its memory: both are cut and viewed alike


class BatchParts(NamedTuple):
    """One value for each part of a batch, in the order of the buffer; `PagedBatch` explains them.

    `spans` is there `rows`.
    """

    positions: Any
    slots: Any
    tables: Any
    spans: Any
    blocks: Any
    splits: Any
    short: Any
    states: Any
    pieces: Any
    runs: Any


class _PartBounds(NamedTuple):
    """Where a part lies: int32 values `begin` to `end` of the buffer, as [height, width]."""

    begin: int
    end: int
    height: int
    width: int

    @property
    def next(self) -> int:
        """Where the part after it begins."""
        return self.end + -(self.end - self.begin) % _ALIGNED


@dataclass(frozen=True)
class BatchShape:
    """Room of one batch: rows, sequences and entries of its work lists; pages of a table's row.

    With `splits`, sequences of up to `short_rows` rows in the step are short (`PagedBatch`); else
    none is. linear: whether sequences have states of linear layers.
    """

    rows: int
    sequences: int
    blocks: int
    splits: int
    width: int
    short_rows: int = 1
    linear: bool = False

    @property
    def pieces(self) -> int:
        """Room for chunks in which rows lie: of sequences that are all short, or of any."""
        if not self.linear:
            return 0
        if not self.blocks:
            return min(self.rows, self.sequences * min(self.short_rows, 2))
        return min(self.rows, self.sequences + self.blocks + self.rows // CHUNK_TOKENS)

    @property
    def runs(self) -> int:
        """Room for sequences with more than one row: long ones, or short ones of several rows."""
        short = self.sequences if self.splits and self.short_rows > 1 else 0
        return min(self.sequences, self.blocks + short) if self.linear else 0

    @property
    def short(self) -> int:
        """Room for short sequences."""
        return self.sequences if self.splits else 0

    def parts(self) -> BatchParts:
        """(height, width) of each part in int32 values."""
        columns = _OFFSET + 1
        return BatchParts(
            positions=(self.rows, _INT64),
            slots=(self.rows, _INT64),
            tables=(self.sequences + 1, self.width),
            spans=(self.sequences + 1, START + 1),
            blocks=(self.blocks, columns),
            splits=(self.splits, columns),
            short=(self.short, columns),
            states=((self.sequences + 1) * self.linear, _FIRST_PIECE + 1),
            pieces=(self.pieces, _KEPT + 1),
            runs=(self.runs, 1),
        )


@dataclass(frozen=True)
class StepShape:
    """Room of a step: of its one batch, or of two micro-batches whose rows follow each other."""

    batches: tuple[BatchShape, ...]

    @cached_property
    def rows(self) -> int:
        """Rows of all batches."""
        return sum(batch.rows for batch in self.batches)

    @cached_property
    def words(self) -> int:
        """int32 values of a packed buffer."""
        return self._bounds[-1].next

    def views(self, packed: _Buffer, wide: object) -> tuple[_Buffer, list[BatchParts]]:
        """Ids [rows], and the parts of each batch, as views of a packed buffer.

        packed: a tensor or an array; wide: its dtype int64, which ids, positions and slots have.
        """
        ids, *parts_of_batches = [
            packed[part.begin : part.end].reshape(part.height, part.width) for part in self._bounds
        ]
        views = iter(parts_of_batches)
        batches = [BatchParts(*(next(views) for _ in batch.parts())) for batch in self.batches]
        batches = [
            parts._replace(
                positions=parts.positions.reshape(-1).view(wide),
                slots=parts.slots.reshape(-1).view(wide),
                runs=parts.runs.reshape(-1),
            )
            for parts in batches
        ]
        return ids.reshape(-1).view(wide), batches

    @cached_property
    def _bounds(self) -> list[_PartBounds]:
        """Those of the ids, then of every batch's parts."""
        bounds: list[_PartBounds] = []
        begin = 0
        for height, width in [(self.rows, _INT64), *(p for b in self.batches for p in b.parts())]:
            bounds.append(_PartBounds(begin, begin + height * width, height, width))
            begin = bounds[-1].next
        return bounds


@dataclass(frozen=True)
class StepSpans:
    """Sequences of a step or micro-batch: first row, count, start int64 [n]; tables [n, width].

    states int64 [n, 3]: slot, standing, and whether it has drafts; zeros without linear layers.
    unverified int64 [n]: positions by which it may begin later, for which its splits are enough.
    snapshots int64 [m, 3]: slot, chunk and place of each that the whole step leaves behind.
    """

    first: np.ndarray
    count: np.ndarray
    start: np.ndarray
    tables: np.ndarray
    states: np.ndarray
    unverified: np.ndarray
    snapshots: np.ndarray

    @staticmethod
    def of(rows: PlanRows, width: int, scratch: int) -> "StepSpans":
        """The spans of a plan's rows; tables int32 are padded with the scratch page."""
        count = rows.count
        tables = np.full((len(rows), width), scratch, np.int32)
        tables[np.arange(width) < rows.held[:, None]] = rows.page_ids
        states = np.zeros((len(rows), _FIRST_PIECE), np.int64)
        if rows.states:
            states[:, :_DRAFTS] = rows.state_columns.T
            states[:, _DRAFTS] = rows.samples > 1
        owner, chunk, slot = snapshot_columns(rows)
        snapshots = np.stack([states[owner, _SLOT], chunk, boundary_of(slot)], 1)
        first = np.cumsum(count) - count
        return StepSpans(first, count, rows.start, tables, states, rows.unverified, snapshots)

    def cut(self, middle: int) -> tuple["StepSpans", "StepSpans"]:
        """The rows before `middle`, and the others counted from it; a sequence may be cut."""
        early = np.clip(middle - self.first, 0, self.count)
        late = self.count - early
        before, after = early > 0, late > 0
        first, start = self.first + early - middle, self.start + early
        states = self.states.copy()
        states[before, _STANDING] = (start[before] - 1) // CHUNK_TOKENS
        early_half = self.first, early, self.start, self.tables, self.states, self.unverified
        late_half = first, late, start, self.tables, states, self.unverified
        return (
            StepSpans(*[*(column[before] for column in early_half), self.snapshots]),
            StepSpans(*[*(column[after] for column in late_half), self.snapshots]),
        )

    def within(self, shape: StepShape) -> list["StepSpans"] | None:
        """The spans of each of the shape's batches; None if they do not fit.

        Sequences of one row want splits in the first, where decode rows stand: as blocks, each
        would walk its keys alone.
        """
        begin, *others = shape.batches
        if others and begin.linear and self.states[:, _DRAFTS].any():
            return None  # a state that drafts leave behind is not the second batch's to move
        parts = list(self.cut(begin.rows)) if others else [self]
        if not begin.splits and (parts[0].count == 1).any():
            return None
        fit = all(part.fits(batch) for part, batch in zip(parts, shape.batches, strict=True))
        return parts if fit else None

    def fits(self, shape: BatchShape) -> bool:
        """Whether a batch has room for them."""
        short = self.short(shape)
        blocks = -(-self.count[~short] // BLOCK_TOKENS)
        splits = self._splits(short)
        return bool(
            self.count.sum() <= shape.rows
            and len(self.count) <= shape.sequences
            and blocks.sum() <= shape.blocks
            and splits.sum() <= shape.splits
            and (not shape.linear or self._pieces().sum() <= shape.pieces)
        )

    def short(self, shape: BatchShape) -> np.ndarray:
        """Which sequences are short in a batch."""
        return (self.count <= shape.short_rows) & bool(shape.splits)

    def _pieces(self) -> np.ndarray:
        """Chunks in which each sequence's rows lie."""
        ends = (self.start + self.count - 1) // CHUNK_TOKENS
        return ends - self.start // CHUNK_TOKENS + 1

    def _splits(self, short: np.ndarray) -> np.ndarray:
        """Attention splits of each short sequence."""
        last = self.start[short] + self.unverified[short] + self.count[short] - 1
        return last // PAGE_TOKENS + 1

    def pack(self, shape: BatchShape, parts: BatchParts, scratch: int) -> None:
        """Write what fits a batch into its parts of a packed buffer on the host."""
        positions, slots, tables, spans, blocks, splits, short, states, pieces, runs = parts
        count, total = len(self.count), int(self.count.sum())
        index = np.repeat(np.arange(count), self.count)
        row_positions = np.arange(total) + np.repeat(self.start - self.first, self.count)
        positions[:total], positions[total:] = row_positions, 0
        slots[:total] = self.tables[index, row_positions // PAGE_TOKENS]
        slots[:total] *= PAGE_TOKENS
        slots[:total] += row_positions % PAGE_TOKENS
        slots[total:] = scratch * PAGE_TOKENS + np.arange(shape.rows - total) % PAGE_TOKENS
        tables[:count], tables[count:] = self.tables, scratch
        spans[:count, _FIRST] = self.first
        spans[:count, _COUNT] = self.count
        spans[:count, START] = self.start
        spans[count:] = 0
        is_short = self.short(shape)
        if shape.blocks:
            self._pack_blocks(shape, np.flatnonzero(~is_short), blocks)
        if shape.splits:
            self._pack_splits(shape, np.flatnonzero(is_short), splits, short)
        if shape.linear:
            self._pack_states(shape, states, pieces, runs)

    def _pack_blocks(self, shape: BatchShape, long: np.ndarray, blocks: np.ndarray) -> None:
        """In the order of `make_batch`: blocks with most keys first."""
        parts = -(-self.count[long] // BLOCK_TOKENS)
        sequence, total = np.repeat(long, parts), int(parts.sum())
        first = (np.arange(total) - np.repeat(np.cumsum(parts) - parts, parts)) * BLOCK_TOKENS
        most_keys_first = np.lexsort((first, sequence, -(self.start[sequence] + first)))
        blocks[:total, _SEQUENCE] = sequence[most_keys_first]
        blocks[:total, _OFFSET] = first[most_keys_first]
        blocks[total:] = (shape.sequences, 0)

    def _pack_splits(
        self, shape: BatchShape, listed: np.ndarray, splits: np.ndarray, short: np.ndarray
    ) -> None:
        lengths = self._splits(listed)
        firsts, total = np.cumsum(lengths) - lengths, int(lengths.sum())
        splits[:total, _SEQUENCE] = np.repeat(listed, lengths)
        splits[:total, _OFFSET] = np.arange(total) - np.repeat(firsts, lengths)
        splits[total:] = (shape.sequences, 0)
        short[: len(listed), _SEQUENCE] = listed
        short[: len(listed), _OFFSET] = firsts
        short[len(listed) :] = (shape.sequences, 0)

    def _pack_states(
        self, shape: BatchShape, states: np.ndarray, pieces: np.ndarray, runs: np.ndarray
    ) -> None:
        """In the order of `make_batch`: sequences with most rows first."""
        order = np.argsort(-self.count, kind="stable")
        chunks, count = self._pieces()[order], int((self.count > 1).sum())
        firsts, total = np.cumsum(chunks) - chunks, int(chunks.sum())
        states[: len(chunks), :_FIRST_PIECE] = self.states
        states[order, _FIRST_PIECE] = firsts
        states[len(chunks) :] = 0
        sequence = np.repeat(order, chunks)
        pieces[:total, _SEQUENCE] = sequence
        pieces[:total, _OFFSET] = np.arange(total) - states[sequence, _FIRST_PIECE]
        pieces[:total, _OFFSET] += self.start[sequence] // CHUNK_TOKENS
        pieces[:total, _KEPT] = -1
        for slot, chunk, snapshot in self.snapshots.tolist():
            begins = chunk * CHUNK_TOKENS - self.start
            passes = (self.states[:, _SLOT] == slot) & (begins >= 0) & (begins < self.count)
            for index in np.flatnonzero(passes):
                number = chunk - self.start[index] // CHUNK_TOKENS
                pieces[states[index, _FIRST_PIECE] + number, _KEPT] = snapshot
        pieces[total:] = (shape.sequences, 0, -1)
        runs[:count], runs[count:] = order[:count], shape.sequences


def pack_step(
    rows: PlanRows,
    shape: StepShape,
    parts: Sequence[StepSpans],
    packed: torch.Tensor,
    scratch: int,
) -> None:
    """Write rows whose spans fit a shape (`within`) into a packed buffer on the host."""
    ids, batches = shape.views(packed.numpy(), np.int64)
    count = sum(int(part.count.sum()) for part in parts)
    ids[:count] = rows.ids
    ids[count:] = 0
    for part, batch, views in zip(parts, shape.batches, batches, strict=True):
        part.pack(batch, views, scratch)


def packed_batches(
    shape: StepShape, packed: torch.Tensor, scratch: int
) -> tuple[torch.Tensor, list[PagedBatch]]:
    """Ids [rows] and the batches that a graph reads, as views of a packed buffer on the device.

    `sequences` of a batch only say that each row belongs to a sequence: no pad row is zeroed.
    """
    ids, batches = shape.views(packed, torch.int64)
    made = []
    for batch, parts in zip(shape.batches, batches, strict=True):
        pages = (scratch,) * -(-batch.rows // PAGE_TOKENS)
        sequences = [PagedSequence(0, batch.rows, 0, pages)]
        if not batch.blocks:
            sequences = [PagedSequence(i, 1, 0, (scratch,)) for i in range(batch.rows)]
        short_rows = batch.short_rows if batch.splits else 0
        made.append(PagedBatch(tuple(sequences), *parts, short_rows=short_rows))
    return ids, made
