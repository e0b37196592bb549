"""CUDA graphs of steps with prompt rows: prefill, chunks, and chunks beside decode rows.

Launching such a step kernel by kernel takes a slow host longer than the GPU takes to run it. It is
replayed from a graph captured at start for a bucket of rows and of attention splits, up to which
it is padded (`packed_step`): embedding and layers, as two micro-batches where exchanges overlap.
The output head and the sampling follow one by one: which rows have logits varies. So does the last
layer's part behind its keys and values: it is launched for those rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from tpdet.control.plan import PlanRows
from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS, PagedBatch
from tpdet.models.alike_layers import AlikeLayers
from tpdet.models.decoder import Decoder, Unfinished
from tpdet.models.micro_batches import first_micro_batch
from tpdet.runner.graphs.captured_steps import CapturedSteps, GraphSource, Results
from tpdet.runner.graphs.decode_graphs import decode_splits
from tpdet.runner.graphs.graph_room import PackedBuffer
from tpdet.runner.graphs.packed_step import BatchShape, StepShape, StepSpans, packed_batches

LEAST_ROWS = 256
"""Rows of the smallest bucket but for those of short prompts."""

SHORT_ROWS = 64, 128
"""Buckets of a short prompt and what decodes beside it. All products of Qwen3-8B's layers take 4.2,
4.7 and 6.0 ms at 64, 128 and 256 rows on an H200, and 3.9 at one."""

_FINE = 8  # buckets between a power of two and the next: 512 prompt and 15 decode rows take 640
_ROUNDED = 128  # rows of a bucket are a multiple of it, unless they are the most there are
_FEWEST_SPLITS, _FEWEST_OF_FEW_ROWS, _FEW_ROWS = 1024, 256, 1024
_FILLED = 32  # rows over 31/32 of the most
_TIMES_SPLITS = 4  # 1,024 pads take 15 us a layer: 0.3 % of a step of 8,192 rows, 4 % of one of 512
_FEWEST_BLOCKS, _ROWS_A_BLOCK = 32, 64  # beside full ones: for the ends of sequences


class StepGraphs(CapturedSteps):
    """Graphs of steps with prompt rows: to the last layer's queries where it finishes some rows.

    Else to the normed rows.
    """

    def __init__(
        self, source: GraphSource, shapes: Sequence[StepShape], ends: Sequence[StepShape]
    ) -> None:
        """Capture every shape; ends: shapes of decode steps, to which wanted rows are padded."""
        self._finishes, self._ends = source.model.finishes_some, ends
        self._buffer: PackedBuffer | None = None
        self._batches: dict[StepShape, tuple[torch.Tensor, list[PagedBatch]]] = {}
        if self._finishes and source.room is not None:
            words = max(shape.words for shape in ends)
            self._buffer = PackedBuffer(source.sampled.device, words)
        super().__init__(source, shapes)

    def run(self, rows: PlanRows) -> torch.Tensor | None:
        """Replay a step: the normed rows whose logits are wanted [R, H]; None if no bucket fits.

        None also where the first with room for the blocks of many short prompts has more than
        twice the rows, and more than `LEAST_ROWS`.
        """
        total = int(rows.count.sum())
        spans = self._spans(rows, self._buckets[0][0])
        most = max(2 * total, LEAST_ROWS)
        for shape, graph in self._buckets:
            parts = spans.within(shape) if total <= shape.rows <= most else None
            if parts is not None:
                self._replay(shape, graph, rows, parts)
                return self._finish(shape, wanted_rows(rows, spans))
        return None

    def _finish(self, shape: StepShape, wanted: StepSpans) -> torch.Tensor:
        """What a step of a shape kept -> its wanted rows, normed: `first` of each is its number."""
        count = len(wanted.first)
        if not self._finishes:
            (x_MH,) = self._kept
            return x_MH[self._on_device(wanted.first)]
        assert self._buffer is not None and self._room is not None
        if count > self._ends[-1].rows:
            x_MH = self._finish_all(self._model, shape, self._room.packed)
            return x_MH[self._on_device(wanted.first)]
        splits = decode_splits(wanted.start)
        end = next(
            each for each in self._ends if each.rows >= count and each.batches[0].splits >= splits
        )
        if count:
            self._buffer.fill(end.words, lambda host: pack_ends(wanted, end, host, self._scratch))
        if end not in self._batches:
            self._batches[end] = packed_batches(end, self._buffer.packed, self._scratch)
        numbers_R, (batch,) = self._batches[end]
        some = self._some(self._model, shape, numbers_R[: end.rows if count else 0])
        return self._model.finish([some], self._pages, batch)[:count]

    def _some(self, model: Decoder, shape: StepShape, numbers_R: torch.Tensor) -> Unfinished:
        """Rows of a packed step by their numbers."""
        hidden_MH, *projected = (part[: shape.rows] for part in self._kept)
        return model.some(Unfinished(hidden_MH, tuple(projected)), numbers_R, _parts(shape))

    def _finish_all(self, model: Decoder, shape: StepShape, packed: torch.Tensor) -> torch.Tensor:
        """The rest of the last layer for all rows of a packed step: [M, H], normed."""
        _, batches = packed_batches(shape, packed, self._scratch)
        cut = (part[: shape.rows].split(_parts(shape)) for part in self._kept)
        rows = [Unfinished(hidden, tuple(rest)) for hidden, *rest in zip(*cut, strict=True)]
        return model.finish(rows, self._pages, *batches)

    def _results(
        self,
        model: Decoder,
        ids_M: torch.Tensor,
        batches: Sequence[PagedBatch],
        alike: AlikeLayers | None,
    ) -> Results:
        if not self._finishes:
            return ([model.hidden(ids_M, self._pages, *batches, alike=alike)],)
        parts = model.begin(ids_M, self._pages, *batches, alike=alike)
        projected = zip(*(part.projected for part in parts), strict=True)
        return [part.hidden_MH for part in parts], *projected

    def _rehearse(self, shape: StepShape, packed: torch.Tensor) -> None:
        super()._rehearse(shape, packed)
        if self._finishes:
            self._finish_all(self._first, shape, packed)
            self._some(self._first, shape, packed.new_zeros(1, dtype=torch.int64))

    @cached_property
    def _alike(self) -> AlikeLayers | None:
        return self._model.alike(self._pages, but_last=self._finishes)

    def _on_device(self, numbers: np.ndarray) -> torch.Tensor:
        rows = torch.from_numpy(numbers)
        if self._sampled.device.type == "cuda":
            rows = rows.pin_memory().to(self._sampled.device, non_blocking=True)
        return rows


def _parts(shape: StepShape) -> tuple[int, ...]:
    """The rows of each micro-batch."""
    return tuple(batch.rows for batch in shape.batches)


def wanted_rows(rows: PlanRows, spans: StepSpans) -> StepSpans:
    """Each row whose logits are wanted, in the rows' order; `first` is its number in the step."""
    logits = rows.logits
    ends = np.cumsum(logits)
    owner = np.repeat(np.arange(len(logits)), logits)
    number = np.arange(len(owner)) + np.repeat(spans.first + spans.count - ends, logits)
    start = spans.start[owner] + number - spans.first[owner]
    one = np.ones_like(number)
    of = spans.tables[owner], spans.states[owner], spans.unverified[owner]
    return StepSpans(number, one, start, *of, spans.snapshots[:0])


def pack_ends(wanted: StepSpans, shape: StepShape, packed: torch.Tensor, scratch: int) -> None:
    """Write wanted rows into a packed buffer on the host, their numbers where ids stand.

    As a batch they follow each other, each a sequence of one row. A pad is row 0.
    """
    numbers, (parts,) = shape.views(packed.numpy(), np.int64)
    count = len(wanted.first)
    numbers[:count], numbers[count:] = wanted.first, 0
    replace(wanted, first=np.arange(count)).pack(shape.batches[0], parts, scratch)


def step_shapes(
    most_rows: int, max_running: int, width: int, overlapped: bool, linear: bool = False
) -> list[StepShape]:
    """Shapes that graphs are captured for, ascending; tables have `width` pages.

    most_rows: of a step; max_running: sequences of a step, at most; overlapped:
    exchanges can overlap products; linear: the model has linear layers.
    """
    return [
        shape
        for rows in step_rows(most_rows)
        for shape in _shapes_of(rows, max_running, width, overlapped, linear, most_rows)
    ]


def step_rows(most: int) -> list[int]:
    """Numbers of rows that graphs are captured for, ascending: `_FINE` for each power of two.

    They are multiples of `_ROUNDED`. Only the coarse ones have graphs for more than 1,024 splits.
    """
    buckets, rows = _coarse_rows(most), LEAST_ROWS
    while rows < most:
        buckets.add(rows)
        rows += max((1 << rows.bit_length() - 1) // _FINE, _ROUNDED)
    return sorted(buckets)


def _coarse_rows(most: int) -> set[int]:
    """`most`, its power of two times 1, 3/4, 1/2, ... down to `LEAST_ROWS`, and `SHORT_ROWS`."""
    buckets = {most, *(rows for rows in SHORT_ROWS if rows < most)}
    power = 1 << (most.bit_length() - 1)
    for halvings in range(most.bit_length()):
        for share in (power >> halvings, 3 * power >> (halvings + 2)):
            rows = -(-share // _ROUNDED) * _ROUNDED
            if rows >= LEAST_ROWS:
                buckets.add(min(rows, most))
    return buckets


def _shapes_of(
    rows: int, max_running: int, width: int, overlapped: bool, linear: bool, most_rows: int
) -> Iterator[StepShape]:
    """By splits. Decode rows stand before prompts: in the second micro-batch none is short."""
    early = first_micro_batch(rows) if overlapped else rows
    sequences = min(max_running, early)
    for splits in _split_buckets(rows, most_rows, sequences * width):
        blocks = _blocks(early, sequences)
        batches = [BatchShape(early, sequences, blocks, splits, width, linear=linear)]
        if late := rows - early:
            sequences_late = min(max_running, late)
            blocks = _blocks(late, sequences_late)
            batches.append(BatchShape(late, sequences_late, blocks, 0, width, linear=linear))
        yield StepShape(tuple(batches))


def _blocks(rows: int, sequences: int) -> int:
    """Room for blocks: full ones, and the last of each of many sequences."""
    ends = min(sequences, max(_FEWEST_BLOCKS, rows // _ROWS_A_BLOCK))
    return -(-rows // BLOCK_TOKENS) + ends


def _split_buckets(rows: int, most_rows: int, most: int) -> Iterator[int]:
    """Numbers of attention splits in steps of `rows`: the fewest, four times as many, ... `most`.

    Over 1,024 in coarse buckets alone. The largest steps have none, too: prompts fill them.
    """
    if rows * _FILLED >= most_rows * (_FILLED - 1):
        yield 0
    if rows not in _coarse_rows(most_rows):
        most = min(most, _FEWEST_SPLITS)
    splits = _FEWEST_OF_FEW_ROWS if rows < _FEW_ROWS else _FEWEST_SPLITS
    while splits < most:
        yield splits
        splits *= _TIMES_SPLITS
    yield most
