"""CUDA graphs of decode steps: one launch instead of hundreds, and not one bit changed.

A decode step (one token a row, logits of each) is replayed from a graph captured at start for a
bucket of rows and of attention splits, up to which it is padded (`packed_step`).
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.kernels import ops
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.models.decoder import Decoder
from tpdet.plan import Row
from tpdet.runner.graph_room import Graph, GraphRoom
from tpdet.runner.packed_step import BatchShape, StepShape, StepSpans, pack_step, packed_batches

MAX_ROWS = 256
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def decode_shapes(max_rows: int, width: int, fixed_rows: int = 0) -> list[StepShape]:
    """Shapes that graphs are captured for, ascending; tables have `width` pages."""
    return [
        StepShape((BatchShape(rows, rows, 0, splits, width),))
        for rows in row_buckets(max_rows, fixed_rows)
        for splits in _split_buckets(rows, width)
    ]


class DecodeGraphs:
    """Graphs of one model over one KV cache, whose last page is the scratch page."""

    def __init__(
        self,
        model: Decoder,
        first: Decoder,
        pages: KeyValuePages,
        drawn: torch.Tensor,
        shapes: Sequence[StepShape],
        room: GraphRoom | None,
    ) -> None:
        """Capture every shape; alike on every rank, for the graphs hold the collectives.

        Without a `room` each is launched once and there are no graphs: what they need compiled.

        first: launches what the model does, before it is captured; drawn: ids int64 of the step
        before, which negative token ids name; shapes: ascending.
        """
        self._pages = pages
        self._drawn = drawn
        self._scratch = pages.layers[0].keys.shape[0] - 1
        self._room = room
        self._logits: torch.Tensor | None = None  # [largest, V'] fp32, every graph writes here
        self._most = shapes[-1].rows
        self._buckets: list[tuple[StepShape, Graph]] = []
        for shape in reversed(shapes):
            if room is None:
                packed = torch.zeros(shape.words, dtype=torch.int32, device=drawn.device)
                self._step(first, shape, packed)
                continue
            self._fill(room, shape, ())
            steps = (partial(self._step, each, shape, room.packed) for each in (model, first))
            self._buckets.append((shape, room.capture(*steps)))
        self._buckets.reverse()

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether a step's rows are all decode rows and not too many."""
        return (
            len(rows) <= self._most
            and all(len(row.token_ids) == 1 and row.logits == 1 for row in rows)
        )  # fmt: skip

    def run(self, rows: Sequence[Row]) -> torch.Tensor:
        """Replay a step: this rank's logits fp32 [len(rows), V'], valid until the next call."""
        needed = sum(row.start // PAGE_TOKENS + 1 for row in rows)
        shape, graph = next(
            (shape, graph)
            for shape, graph in self._buckets
            if shape.rows >= len(rows) and shape.batches[0].splits >= needed
        )
        assert self._room is not None and self._logits is not None
        self._fill(self._room, shape, rows)
        graph.replay()
        return self._logits[: len(rows)]

    def _fill(self, room: GraphRoom, shape: StepShape, rows: Sequence[Row]) -> None:
        spans = StepSpans.of(rows, shape.batches[0].width, self._scratch)
        room.fill(shape.words, lambda host: pack_step(rows, shape, [spans], host, self._scratch))

    def _step(self, model: Decoder, shape: StepShape, packed: torch.Tensor) -> None:
        """What a graph holds: the model over the packed rows, to the logits."""
        ids, batches = packed_batches(shape, packed, self._scratch)
        x_MH = model.hidden(ops.resolve_drawn(ids, self._drawn), self._pages, *batches)
        logits = model.local_logits(x_MH)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits[: len(ids)].copy_(logits)


def row_buckets(max_rows: int, fixed_rows: int = 0) -> list[int]:
    """Numbers of rows that graphs are captured for, ascending; one if the batch is fixed."""
    if fixed_rows:
        return [fixed_rows]
    largest = min(max_rows, MAX_ROWS)
    return sorted({*(n for n in _ROWS if n < largest), largest})


def _split_buckets(rows: int, width: int) -> Iterator[int]:
    """Numbers of attention splits for `rows` rows: rows times 1, 2, 4, ... up to `width` pages."""
    pages = 1
    while pages < width:
        yield rows * pages
        pages *= 2
    yield rows * width
