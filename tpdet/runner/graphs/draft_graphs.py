"""CUDA graphs of decode steps with drafts: rows of several positions, each with its logits.

Such a step is a decode step whose sequences have up to 16 rows: the same kernels of attention read
a sequence's keys once for all of them. It is padded to a bucket of rows, sequences, positions of a
sequence and attention splits. There are many buckets, and a server meets few of them, so a graph
is captured when the second step needs it, as a capture takes as long as ten steps without one. A
step behind unverified drafts has one at once, else the host would wait. Every rank then captures
the same, as plans are equal. Those that are usual with a draft model are captured at the start.
"""

import logging
from collections.abc import Sequence
from functools import cache, partial

import torch

from tpdet.control.plan import PlanRows
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.runner.graphs.captured_steps import CapturedSteps, GraphSource, Results
from tpdet.runner.graphs.decode_graphs import split_buckets
from tpdet.runner.graphs.draft_moves import DraftMoves
from tpdet.runner.graphs.graph_room import Graph
from tpdet.runner.graphs.packed_step import BatchShape, StepShape

_ROWS = (2, 4, 8, 16, 32, 64, 128, HEAD_ROWS)
_SEQUENCES = (1, 4, 16, 64, HEAD_ROWS)
_POSITIONS = (4, SHORT_TOKENS)
_TIMES_SPLITS = 4  # pad splits cost little: a program that reads two numbers
_REHEARSED = (1, 64, HEAD_ROWS)  # sequences: attention has their kernels alone
_MOST_GRAPHS = 64  # that steps capture: a GPU keeps some MiB for each
USUAL_SEQUENCES = 16
"""Sequences of a step with a draft model's drafts that finds its graph captured, at most."""
_USUAL_SPLITS = 2  # buckets: sequences of up to 1,024 tokens

_log = logging.getLogger("tpdet.engine")


class DraftGraphs(CapturedSteps):
    """Graphs of decode steps with drafts, to this rank's logits."""

    def __init__(self, source: GraphSource, max_rows: int, width: int) -> None:
        """Capture nothing yet; without a room for graphs each kind of step is launched once.

        max_rows: sequences of a step, at most; width: pages of a table's row.
        """
        self._width = width
        linear = source.pages.states is not None
        shapes = [] if source.room is not None else rehearsed_shapes(max_rows, width, linear)
        super().__init__(source, shapes)
        self._graphs: dict[StepShape, Graph | None] = {}  # None: one step had the shape so far
        self._captured, self._most = 0, _MOST_GRAPHS

    @property
    def kept(self) -> torch.Tensor | None:
        """Where the logits of every step stand, fp32 [rows, V']; None before the first capture."""
        return self._kept[0] if self._kept else None

    def run(self, rows: PlanRows, moves: DraftMoves | None = None) -> torch.Tensor | None:
        """Replay a step: this rank's logits fp32 [tokens, V'], valid until the next call.

        None where it has too many rows, or other rows than decode rows and rows with drafts, and
        for the first step of a shape without moves. moves: of rows behind unverified drafts.
        """
        total = int(rows.count.sum())
        if total > HEAD_ROWS or not rows.verifies or rows.count.max() > SHORT_TOKENS:
            return None
        shape = draft_shape(rows, total, self._width)
        graph = self._graphs.get(shape)
        if graph is None and (moves is not None or shape in self._graphs):
            graph = self._capture_first(shape)
        if graph is None:
            self._graphs.setdefault(shape)
            return None
        return self._replay(shape, graph, rows, [self._spans(rows, shape)], moves)[0][:total]

    def capture(self, shapes: Sequence[StepShape]) -> None:
        """Capture graphs before the first step that needs them; alike on every rank."""
        self._most += len(shapes)
        for shape in shapes:
            if self._graphs.get(shape) is None:
                self._capture_first(shape)

    def _capture_first(self, shape: StepShape) -> Graph | None:
        """The graph of a shape that has none yet; None if there are graphs enough."""
        if self._room is None or self._captured == self._most:
            return None
        batch = shape.batches[0]
        _log.debug(
            "capturing a CUDA graph of %d rows of %d sequences with up to %d positions",
            batch.rows,
            batch.sequences,
            batch.short_rows,
        )
        graph = self._graphs[shape] = self._capture(self._room, shape)
        self._captured += 1
        return graph

    def _room_for(self, results: Results) -> tuple[torch.Tensor, ...]:
        return tuple(parts[0].new_empty(HEAD_ROWS, *parts[0].shape[1:]) for parts in results)


def draft_shape(rows: PlanRows, total: int, width: int) -> StepShape:
    """The bucket of a step of `total` rows; tables have `width` pages."""
    sequences = _least(_SEQUENCES, len(rows))
    last = rows.start + rows.unverified + rows.count - 1
    needed = int((last // PAGE_TOKENS + 1).sum())
    splits = _least([*_split_buckets(sequences, width)], needed)
    positions = _least(_POSITIONS, int(rows.count.max()))
    linear = bool(rows.states)
    return _shape_of(_least(_ROWS, total), sequences, splits, width, positions, linear)


def rehearsed_shapes(max_rows: int, width: int, linear: bool = False) -> list[StepShape]:
    """Shapes whose kernels are those of every shape, for steps of up to `max_rows` sequences."""
    most = _least(_SEQUENCES, min(max_rows, HEAD_ROWS))
    return [
        _shape(sequences, positions, splits, width, linear)
        for sequences in dict.fromkeys(min(each, most) for each in _REHEARSED)
        for positions in _POSITIONS
        for splits in _split_buckets(sequences, width)
    ]


def usual_shapes(max_rows: int, width: int, tokens: int, linear: bool = False) -> list[StepShape]:
    """Shapes of steps of few sequences that are not long, with up to `tokens` of each."""
    most = _least(_SEQUENCES, min(max_rows, USUAL_SEQUENCES))
    shapes = [
        _shape_of(_least(_ROWS, rows), sequences, splits, width, positions, linear)
        for sequences in _SEQUENCES
        if sequences <= most
        for positions in _POSITIONS
        if positions <= _least(_POSITIONS, tokens)
        # From a quarter of the positions on: fewer sequences are in the bucket, or fewer have most.
        for rows in (sequences * share for share in (positions // 4, positions // 2, positions))
        if positions // 4 < rows <= sequences * tokens
        for splits in list(_split_buckets(sequences, width))[:_USUAL_SPLITS]
    ]
    return list(dict.fromkeys(shapes))


def largest_shape(max_rows: int, width: int, linear: bool = False) -> StepShape:
    """The shape with the largest buffer, for steps of up to `max_rows` sequences."""
    sequences = _least(_SEQUENCES, min(max_rows, HEAD_ROWS))
    return _shape(sequences, SHORT_TOKENS, sequences * width, width, linear)


def _shape(sequences: int, positions: int, splits: int, width: int, linear: bool) -> StepShape:
    rows = _least(_ROWS, min(sequences * positions, HEAD_ROWS))
    return _shape_of(rows, sequences, splits, width, positions, linear)


@cache
def _shape_of(
    rows: int, sequences: int, splits: int, width: int, positions: int, linear: bool
) -> StepShape:
    """One object for each shape: it knows then where its parts lie."""
    return StepShape((BatchShape(rows, sequences, 0, splits, width, positions, linear),))


_split_buckets = partial(split_buckets, times=_TIMES_SPLITS)


def _least(buckets: Sequence[int], needed: int) -> int:
    """The first of ascending buckets with room for `needed`."""
    return next(bucket for bucket in buckets if bucket >= needed)
