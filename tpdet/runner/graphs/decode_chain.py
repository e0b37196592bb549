"""Decode steps that follow each other on the GPU, without numbers from the host in between.

A decode graph reads its step from a packed buffer. After it a second graph samples, keeps the
tokens for the next step, and moves positions, KV slots and noise in the buffers on by one. So the
host packs one step, and replays both graphs as often as there are steps of the same rows in the
same pages. A draft model does so: its steps are shorter than the host's work for a planned one.

The bits are those of planned steps: the graphs and kernels are the same.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from tpdet.control.plan import PlanRows
from tpdet.kernels import ops
from tpdet.kernels.inputs.plain_rows import WORDS, PlainRows
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.models.decoder import Decoder
from tpdet.runner.graphs.decode_graphs import PackedStep, row_buckets
from tpdet.runner.graphs.draft_graphs import USUAL_SEQUENCES, usual_shapes
from tpdet.runner.graphs.engine_graphs import Graphs
from tpdet.runner.graphs.graph_room import Graph, PackedBuffer
from tpdet.runner.graphs.packed_step import START, StepShape
from tpdet.sampling.sampler import PendingSample, to_host

MOST_STEPS = 16
"""Steps of a link, at most: the device keeps the answers of each."""
_FIELDS = 3  # of `PendingSample.packed`
_WAYS = [PlainRows.of([RowParams(1.0, 1, 3, top_p=top_p)]) for top_p in (1.0, 0.9)]
"""A row that is not filtered, and one that is: graphs differ by that."""


class _ChainMemory(NamedTuple):
    """What the second graph reads and writes, besides logits; R rows with pads."""

    packed: torch.Tensor
    """int32: the packed step."""
    numbers: torch.Tensor
    """int64: `write_rows` [R * WORDS], ids of the next step [R], 1 for a row and 0 for a pad [R],
    and the number of the step [1]."""
    sampled: torch.Tensor
    """int64: ids of the step before."""
    answers: torch.Tensor
    """fp64 [MOST_STEPS, R, 3]."""


class DecodeChain:
    """Makes links of a chain: steps of the same rows. A new link ends the one before it."""

    def __init__(
        self, graphs: Graphs, model: Decoder, sampled: torch.Tensor, vocab_size: int
    ) -> None:
        """Over one rank's captured graphs and its `sampled`; nothing more is captured yet."""
        assert graphs.decode.room is not None
        self._engine_graphs, self._room = graphs, graphs.decode.room
        self._model, self._sampled, self._vocab_size = model, sampled, vocab_size
        self._advances: dict[tuple[int, bool], Graph] = {}
        self._samples: dict[tuple[int, int, bool], Graph] = {}
        values, device = MOST_STEPS * HEAD_ROWS * _FIELDS, sampled.device
        self._numbers = PackedBuffer(device, 2 * _numbers(HEAD_ROWS))  # of `_ChainMemory`
        self._answers = torch.zeros(values, dtype=torch.float64, device=device)
        self._link: ChainedSteps | None = None

    def begin(self, rows: PlanRows, params: PlainRows) -> "ChainedSteps | None":
        """Pack decode rows, whose tokens are sampled by `params`; None where there is no graph.

        Their next positions are to be in the same pages for each step that follows.
        """
        if not self._engine_graphs.decode.takes(rows):
            return None
        self._end_link()
        step = self._engine_graphs.decode.pack(rows)
        filtered = self._write(params, step.shape.rows)
        advance = self._advance_of(step, filtered)
        self._link = ChainedSteps(step.graph, advance, self._memory(step.shape.rows), len(rows))
        return self._link

    def sample(self, logits: torch.Tensor, params: PlainRows) -> PendingSample | None:
        """Sample a planned step in one launch: fp32 [R, V], R params; None without a graph.

        For logits that a graph left at its place. The tokens also stand in `sampled`.
        """
        buffer, count = self._engine_graphs.buffer_of(logits), len(params)
        if buffer is None or count > HEAD_ROWS:
            return None
        self._end_link()
        rows = min(next(size for size in row_buckets(HEAD_ROWS) if size >= count), len(buffer))
        self._sample_of(buffer, rows, self._write(params, rows)).replay()
        packed = self._memory(rows).answers[0, :count].clone()
        host, copied = to_host(packed.view(-1))
        tokens = self._sampled[:count]
        return PendingSample(tokens, packed, (None,) * count, (0,) * count, host, copied)

    def _end_link(self) -> None:
        if self._link is not None:
            self._link.copy_answers()
        self._link = None

    def _memory(self, rows: int) -> _ChainMemory:
        numbers = self._numbers.packed.view(torch.int64)[: _numbers(rows)]
        answers = self._answers[: MOST_STEPS * rows * _FIELDS].view(MOST_STEPS, rows, _FIELDS)
        return _ChainMemory(self._room.packed, numbers, self._sampled, answers)

    def _write(self, params: PlainRows, rows: int) -> bool:
        """Write the numbers of `rows` rows, the last of them pads; whether any row is filtered."""
        numbers, count = np.zeros(_numbers(rows), np.int64), len(params)
        of_rows, ids, live, _ = _cut(numbers, rows)
        filtered = ops.write_rows(self._sampled, params, self._vocab_size, of_rows)
        ids[:count] = -1 - np.arange(count)
        live[:count] = 1

        def pack(host: torch.Tensor) -> None:
            host.numpy()[:] = numbers.view(np.int32)

        self._numbers.fill(2 * len(numbers), pack)
        return filtered

    def capture(self, max_rows: int, width: int, tokens: int) -> None:
        """Capture what calls for few sequences need, which are not long, before the first one.

        max_rows: sequences of a call, at most; width: pages of a table's row; tokens: of each in
        the call's first step, at most.
        """
        decode, drafts = self._engine_graphs.decode, self._engine_graphs.drafts
        few = [rows for rows in row_buckets(max_rows) if rows <= USUAL_SEQUENCES]
        buffers = [(decode.pack_pads(few[-1]).logits, few)]
        if drafts is not None:
            drafts.capture(usual_shapes(max_rows, width, tokens))
            if drafts.kept is not None:
                counts = row_buckets(len(drafts.kept))
                buffers.append((drafts.kept, [n for n in counts if 1 < n <= tokens * few[-1]]))
        for params in _WAYS:
            for rows in few:
                self._advance_of(decode.pack_pads(rows), self._write(params, rows))
            for buffer, counts in buffers:
                for rows in counts:
                    self._sample_of(buffer, rows, self._write(params, rows))

    def _advance_of(self, step: PackedStep, filtered: bool) -> Graph:
        """The second graph; shapes of as many rows differ behind what it moves on, and share it."""
        key = step.shape.rows, filtered
        if key not in self._advances:
            memory = self._memory(step.shape.rows)

            def first() -> None:
                copies = _ChainMemory(*(part.clone() for part in memory))
                self._advance(copies, step.shape, step.logits, filtered)

            advance = partial(self._advance, memory, step.shape, step.logits, filtered)
            self._advances[key] = self._room.capture(advance, first)
        return self._advances[key]

    def _sample_of(self, buffer: torch.Tensor, rows: int, filtered: bool) -> Graph:
        """The graph that samples the first `rows` of fp32 [R, V] which a step's graph has left."""
        key = buffer.data_ptr(), rows, filtered
        if key not in self._samples:
            run = partial(self._sample, self._memory(rows), buffer[:rows], filtered)
            self._samples[key] = self._room.capture(run, run)
        return self._samples[key]

    def _advance(
        self, memory: _ChainMemory, shape: StepShape, logits: torch.Tensor, filtered: bool
    ) -> None:
        """Sample a step and make the buffers those of the next."""
        self._sample(memory, logits, filtered)
        of_rows, next_ids, live, number = _cut(memory.numbers, shape.rows)
        ids, (parts,) = shape.views(memory.packed, torch.int64)
        ids.copy_(next_ids)
        parts.positions.add_(live)
        parts.slots.add_(live)
        parts.spans[: shape.rows, START].add_(live)
        ops.move_on(of_rows, live)
        number.add_(1)

    def _sample(self, memory: _ChainMemory, logits: torch.Tensor, filtered: bool) -> None:
        """Sample a step: its answers, and its tokens for the step behind it."""
        of_rows, _, _, number = _cut(memory.numbers, len(logits))
        logits = self._model.whole_logits(logits)
        sample = ops.sample_written(logits, of_rows, filtered, Shard(0, logits.shape[1]))
        memory.answers.index_copy_(0, number, sample.packed[None])
        # -1 (a row that found no token, and fails) must not be read as an id.
        memory.sampled[: len(logits)].copy_(sample.tokens.clamp(min=0))


class ChainedSteps:
    """Steps of the same rows, one position after the other."""

    def __init__(self, decode: Graph, advance: Graph, memory: _ChainMemory, rows: int) -> None:
        self._graphs = decode, advance
        self._memory, self._rows = memory, rows
        self._steps = 0
        self._copied: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether no further step has room for its answers."""
        return self._steps == MOST_STEPS

    def step(self) -> int:
        """Launch the next step; its number."""
        for graph in self._graphs:
            graph.replay()
        self._steps += 1
        return self._steps - 1

    def copy_answers(self) -> None:
        """Begin to copy the answers to the host, when no further step follows."""
        if self._copied is None:
            # Of their own: the next link writes where these stand.
            self._copied = to_host(self._memory.answers[: self._steps].clone())

    def answers(self, step: int) -> PendingSample:
        """What a step sampled; no step may follow."""
        self.copy_answers()
        assert self._copied is not None
        host, copied = self._copied
        count, memory = self._rows, self._memory
        tokens, packed = memory.sampled[:count], memory.answers[step, :count]
        values = host[step, :count].view(-1)
        return PendingSample(tokens, packed, (None,) * count, (0,) * count, values, copied)


def _numbers(rows: int) -> int:
    """int64 values of `_ChainMemory.numbers`."""
    return rows * (WORDS + 2) + 1


def _cut(numbers: Any, rows: int) -> tuple[Any, Any, Any, Any]:
    """The four parts of `_ChainMemory.numbers`, of an array or a tensor."""
    table, ids, live = (rows * words for words in (WORDS, WORDS + 1, WORDS + 2))
    return numbers[:table], numbers[table:ids], numbers[ids:live], numbers[live:]
