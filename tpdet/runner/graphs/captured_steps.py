"""What graphs of decode steps and of steps with prompt rows share: capture, fill, replay."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.control.plan import NO_ROWS, PlanRows
from tpdet.kernels import ops
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.models.alike_layers import AlikeLayers
from tpdet.models.decoder import Decoder
from tpdet.runner.graphs.draft_moves import DraftMoves, rehearse_moves
from tpdet.runner.graphs.graph_room import Graph, GraphRoom
from tpdet.runner.graphs.packed_step import StepShape, StepSpans, pack_step, packed_batches

Results: TypeAlias = tuple[Sequence[torch.Tensor], ...]


class GraphSource(NamedTuple):
    """What the graphs of an engine are captured of, and with."""

    model: Decoder
    first: Decoder
    """Launches what the model does, before it is captured."""
    pages: KeyValuePages
    sampled: torch.Tensor
    """Ids int64 of the step before, which negative token ids name."""
    room: GraphRoom | None
    """None: each step is launched once, and there are no graphs: what they need compiled."""


class CapturedSteps:
    """Graphs of one model over one KV cache, whose last page is the scratch page."""

    def __init__(self, source: GraphSource, shapes: Sequence[StepShape]) -> None:
        """Capture every shape, of ascending ones; alike on every rank: graphs hold collectives."""
        self._model, self._first, self._pages, self._sampled, self._room = source
        self._scratch = self._pages.attention[0].keys.shape[0] - 1
        self._kept: tuple[torch.Tensor, ...] = ()  # [largest, ...], every graph writes here
        # A capture by alike layers keeps a stream of rows longer: no larger than half of what the
        # largest graph has, which knows no other steps.
        self._alike_rows = max(HEAD_ROWS, max((shape.rows for shape in shapes), default=0) // 2)
        self._buckets: list[tuple[StepShape, Graph]] = []
        for shape in reversed(shapes):
            if self._room is None:
                packed = torch.zeros(shape.words, dtype=torch.int32, device=self._sampled.device)
                self._rehearse(shape, packed)
                continue
            self._buckets.append((shape, self._capture(self._room, shape)))
        self._buckets.reverse()

    def buffer_of(self, kept: torch.Tensor) -> torch.Tensor | None:
        """All that graphs keep, if these are its first rows: they stand there after every step."""
        known = self._kept and self._kept[0].data_ptr() == kept.data_ptr()
        return self._kept[0] if known else None

    @cached_property
    def _alike(self) -> AlikeLayers | None:
        return self._model.alike(self._pages)

    def _results(
        self,
        model: Decoder,
        ids_M: torch.Tensor,
        batches: Sequence[PagedBatch],
        alike: AlikeLayers | None,
    ) -> Results:
        """Run the model over the rows: the logits [M, ...] that a graph keeps of each part."""
        return ([model.local_logits(model.hidden(ids_M, self._pages, *batches, alike=alike))],)

    def _rehearse(self, shape: StepShape, packed: torch.Tensor) -> None:
        """Launch by the first model what a graph of this shape holds, so that all is loaded."""
        self._step(self._first, shape, packed)
        ids, batches = shape.views(packed, torch.int64)
        if len(batches) == 1:
            rehearse_moves(ids, batches[0], self._sampled)

    def _capture(self, room: GraphRoom, shape: StepShape) -> Graph:
        self._fill(room, shape, NO_ROWS, self._spans(NO_ROWS, shape).within(shape) or [])
        few = shape.rows <= self._alike_rows and len(shape.batches) == 1
        step = partial(self._step, self._model, shape, room.packed, few)
        return room.capture(step, partial(self._rehearse, shape, room.packed))

    def _replay(
        self,
        shape: StepShape,
        graph: Graph,
        rows: PlanRows,
        parts: list[StepSpans],
        moves: DraftMoves | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run a step; what all graphs keep, of which the step's rows come first.

        moves: of a step of one batch.
        """
        assert self._room is not None and self._kept
        self._fill(self._room, shape, rows, parts)
        if moves is not None:
            ids, (batch,) = shape.views(self._room.packed, torch.int64)
            moves.write(ids, batch)
        graph.replay()
        return self._kept

    def _spans(self, rows: PlanRows, shape: StepShape) -> StepSpans:
        return StepSpans.of(rows, shape.batches[0].width, self._scratch)

    def _fill(
        self, room: GraphRoom, shape: StepShape, rows: PlanRows, parts: list[StepSpans]
    ) -> None:
        room.fill(shape.words, lambda host: pack_step(rows, shape, parts, host, self._scratch))

    def _step(
        self,
        model: Decoder,
        shape: StepShape,
        packed: torch.Tensor,
        few: bool = False,
    ) -> None:
        """What a graph holds: the model over the packed rows, to what is kept of them.

        few: they are captured by alike layers.
        """
        ids, batches = packed_batches(shape, packed, self._scratch)
        ids = ops.resolve_sampled(ids, self._sampled)
        results = self._results(model, ids, batches, self._alike if few else None)
        if not self._kept:
            self._kept = self._room_for(results)
        for kept, parts in zip(self._kept, results, strict=True):
            rows = kept[: len(ids)].split([len(part) for part in parts])
            for to, part in zip(rows, parts, strict=True):
                to.copy_(part)

    def _room_for(self, results: Results) -> tuple[torch.Tensor, ...]:
        """Where all graphs keep theirs; results: of the first, which is the largest."""
        return tuple(
            parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:]) for parts in results
        )
