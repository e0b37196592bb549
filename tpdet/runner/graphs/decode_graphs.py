"""CUDA graphs of decode steps: one launch instead of hundreds, and not one bit changed.

A decode step (one token a row, logits of each) is replayed from a graph captured at start for a
bucket of rows and of attention splits, up to which it is padded (`packed_step`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from tpdet.control.plan import NO_ROWS, PlanRows
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.runner.graphs.captured_steps import CapturedSteps
from tpdet.runner.graphs.draft_moves import DraftMoves
from tpdet.runner.graphs.graph_room import Graph, GraphRoom
from tpdet.runner.graphs.packed_step import BatchShape, StepShape

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, HEAD_ROWS)


def decode_shapes(
    max_rows: int, width: int, fixed_rows: int = 0, linear: bool = False
) -> list[StepShape]:
    """Shapes of graphs, ascending, their tables `width` pages wide. linear: as the model is."""
    return [
        StepShape((BatchShape(rows, rows, 0, splits, width, linear=linear),))
        for rows in row_buckets(max_rows, fixed_rows)
        for splits in split_buckets(rows, width, times=2)
    ]


class PackedStep(NamedTuple):
    """A step that stands in the graphs' packed buffer (`DecodeGraphs.room`)."""

    shape: StepShape
    graph: Graph
    logits: torch.Tensor
    """fp32 [shape.rows, V'], once the graph has run: the step's rows, then pads."""


class DecodeGraphs(CapturedSteps):
    """Graphs of decode steps, to this rank's logits."""

    @property
    def room(self) -> GraphRoom | None:
        """What all graphs share; None if there are none."""
        return self._room

    def takes(self, rows: PlanRows) -> bool:
        """Whether a step's rows are all decode rows and not too many."""
        return rows.decodes and len(rows) <= self._buckets[-1][0].rows

    def run(self, rows: PlanRows, moves: DraftMoves | None = None) -> torch.Tensor:
        """Replay a step: this rank's logits fp32 [len(rows), V'], valid until the next call.

        moves: of rows behind unverified drafts.
        """
        shape, graph = self._fitting(rows)
        parts = [self._spans(rows, shape)]
        return self._replay(shape, graph, rows, parts, moves)[0][: len(rows)]

    def pack(self, rows: PlanRows) -> PackedStep:
        """Pack a step, whose graph the caller replays."""
        shape, graph = self._fitting(rows)
        assert self._room is not None and self._kept
        self._fill(self._room, shape, rows, [self._spans(rows, shape)])
        return PackedStep(shape, graph, self._kept[0][: shape.rows])

    def pack_pads(self, rows: int) -> PackedStep:
        """Pack the smallest step of a bucket of rows, all of them pads."""
        shape, graph = next(bucket for bucket in self._buckets if bucket[0].rows == rows)
        assert self._room is not None and self._kept
        self._fill(self._room, shape, NO_ROWS, self._spans(NO_ROWS, shape).within(shape) or [])
        return PackedStep(shape, graph, self._kept[0][: shape.rows])

    def _fitting(self, rows: PlanRows) -> tuple[StepShape, Graph]:
        needed = decode_splits(rows.start + rows.unverified)
        return next(
            (shape, graph)
            for shape, graph in self._buckets
            if shape.rows >= len(rows) and shape.batches[0].splits >= needed
        )


def decode_splits(start: np.ndarray) -> int:
    """Attention splits of decode rows at positions `start` int64 [n]."""
    return int((start // PAGE_TOKENS + 1).sum())


def row_buckets(max_rows: int, fixed_rows: int = 0) -> list[int]:
    """Numbers of rows that graphs are captured for, ascending; one if the batch is fixed."""
    if fixed_rows:
        return [fixed_rows]
    largest = min(max_rows, HEAD_ROWS)
    return sorted({*(n for n in _ROWS if n < largest), largest})


def split_buckets(rows: int, width: int, times: int) -> Iterator[int]:
    """Numbers of attention splits: rows times 1, `times`, its square, ... up to `width` pages."""
    pages = 1
    while pages < width:
        yield rows * pages
        pages *= times
    yield rows * width
