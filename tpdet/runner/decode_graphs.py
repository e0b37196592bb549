"""CUDA graphs of decode steps: one launch instead of hundreds, and not one bit changed.

A decode step (one token a row, logits of each) is replayed from a graph captured at start for a
bucket of rows and of attention splits. Rows and splits are padded up to the bucket: pad rows read
token 0 and write to a scratch page that no sequence owns, pad splits belong to a sequence without
rows. A row's bits depend on neither (docs/numerics.md, section 8).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.comm.device import ranks_per_gpu
from tpdet.config import EngineConfig
from tpdet.kernels import ops
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.kernels.paged_batch import PagedBatch, PagedSequence
from tpdet.models.decoder import Decoder
from tpdet.plan import Row

MAX_ROWS = 256
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ALIGNED = 4  # int32 values in 16 bytes: kernels are specialised on that


@dataclass(frozen=True)
class _Bucket:
    """A captured graph and the buffers it reads.

    `hosts` take turns: one may still wait to be copied when the next step is packed.
    """

    rows: int
    splits: int
    hosts: tuple[torch.Tensor, torch.Tensor]
    copied: tuple[torch.cuda.Event, torch.cuda.Event]
    device: torch.Tensor
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Graphs of one model over one KV cache, whose last page is the scratch page."""

    def __init__(
        self,
        model: Decoder,
        pages: KeyValuePages,
        drawn: torch.Tensor,
        max_rows: int,
        context: int,
        fixed_rows: int = 0,
        capture: bool = True,
    ) -> None:
        """Capture every bucket; alike on every rank, for the graphs hold the collectives.

        Without `capture` each is launched once and there are no graphs: what they need compiled.

        drawn: ids int64 of the step before, on the GPU, which negative token ids name.
        fixed_rows: rows of every decode step, so that no other bucket is wanted; 0 for any.
        """
        self._model = model
        self._pages = pages
        self._drawn = drawn
        self._device = drawn.device
        self._scratch = pages.layers[0].keys.shape[0] - 1
        self._width = -(-context // PAGE_TOKENS)
        self._stream = torch.cuda.Stream(self._device) if capture else None
        self._pool: Any = None
        self._logits: torch.Tensor | None = None  # [largest, V'] fp32, every graph writes here
        self._turn = 0
        self._buckets: list[_Bucket] = []
        for rows in reversed(
            row_buckets(max_rows, fixed_rows)
        ):  # largest first: the others fit into its memory
            for splits in reversed(list(_split_buckets(rows, self._width))):
                if capture:
                    self._buckets.append(self._capture(rows, splits))
                else:
                    cells = self._cells(rows, splits)
                    packed = torch.zeros(cells, dtype=torch.int32, device=self._device)
                    self._step(*self._views(packed, rows, splits))
        self._buckets.reverse()

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether a step's rows are all decode rows and not too many."""
        return (
            len(rows) <= self._buckets[-1].rows
            and all(len(row.token_ids) == 1 and row.logits == 1 for row in rows)
        )  # fmt: skip

    def run(self, rows: Sequence[Row]) -> torch.Tensor:
        """Replay a step: this rank's logits fp32 [len(rows), V'], valid until the next call."""
        needed = sum(row.start // PAGE_TOKENS + 1 for row in rows)
        bucket = next(b for b in self._buckets if b.rows >= len(rows) and b.splits >= needed)
        self._turn = 1 - self._turn
        host, copied = bucket.hosts[self._turn], bucket.copied[self._turn]
        copied.synchronize()  # the last copy out of this buffer is done
        self._pack(host, rows, bucket.rows, bucket.splits)
        bucket.device.copy_(host, non_blocking=True)
        copied.record()
        bucket.graph.replay()
        assert self._logits is not None
        return self._logits[: len(rows)]

    def _pack(self, host: torch.Tensor, rows: Sequence[Row], height: int, splits: int) -> None:
        """Write a step's integers into a packed buffer; sequence `height` has no rows."""
        wide, narrow = self._layout(host, height, splits)
        count, slot_of_pad = len(rows), self._scratch * PAGE_TOKENS
        starts = np.fromiter((row.start for row in rows), np.int64, count)
        wide[0, :count] = [row.token_ids[0] for row in rows]
        wide[0, count:] = 0
        wide[1, :count] = starts
        wide[1, count:] = 0
        last_pages = np.fromiter((row.pages[-1] for row in rows), np.int64, count)
        wide[2, :count] = last_pages * PAGE_TOKENS + starts % PAGE_TOKENS
        wide[2, count:] = slot_of_pad + np.arange(height - count) % PAGE_TOKENS
        tables, spans, pairs, short = narrow
        tables[:] = self._scratch
        held = np.fromiter((len(row.pages) for row in rows), np.int64, count)
        pages = np.fromiter(chain.from_iterable([row.pages for row in rows]), np.int32, held.sum())
        tables[:count][np.arange(self._width) < held[:, None]] = pages
        spans[:] = 0
        spans[:count, 0] = np.arange(count)
        spans[:count, 1] = 1
        spans[:count, 2] = starts
        lengths = starts // PAGE_TOKENS + 1
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if count else 0
        pairs[:total, 0] = np.repeat(np.arange(count), lengths)
        pairs[:total, 1] = np.arange(total) - np.repeat(ends - lengths, lengths)
        pairs[total:] = (height, 0)
        short[:count, 0] = np.arange(count)
        short[:count, 1] = ends - lengths
        short[count:] = (height, 0)

    def _sizes(self, height: int, splits: int) -> list[tuple[int, int]]:
        """Rows and columns of the int32 matrices: tables, rows, splits, short of a PagedBatch."""
        return [(height + 1, self._width), (height + 1, 3), (splits, 2), (height, 2)]

    def _layout(
        self, host: torch.Tensor, height: int, splits: int
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """A packed host buffer as int64 [3, height] (ids, positions, slots) and its matrices."""
        flat = host.numpy()
        wide = flat[: 6 * height].view(np.int64).reshape(3, height)
        matrices, begin = [], 6 * height
        for height_of, width in self._sizes(height, splits):
            matrices.append(flat[begin : begin + height_of * width].reshape(height_of, width))
            begin += height_of * width + (-height_of * width % _ALIGNED)
        return wide, matrices

    def _views(
        self, packed: torch.Tensor, height: int, splits: int
    ) -> tuple[torch.Tensor, PagedBatch]:
        """Ids [rows] and the batch as views of a packed buffer on the GPU."""
        ids, positions, slots = packed[: 6 * height].view(torch.int64).view(3, height)
        matrices, begin = [], 6 * height
        for height_of, width in self._sizes(height, splits):
            matrices.append(packed[begin : begin + height_of * width].view(height_of, width))
            begin += height_of * width + (-height_of * width % _ALIGNED)
        tables, spans, pairs, short = matrices
        batch = PagedBatch(
            sequences=tuple(PagedSequence(i, 1, 0, (self._scratch,)) for i in range(height)),
            positions=positions,
            slots=slots,
            tables=tables,
            rows=spans,
            blocks=tables.new_empty(0, 2),
            splits=pairs,
            short=short,
            short_rows=1,
        )
        return ids, batch

    def _step(self, ids: torch.Tensor, batch: PagedBatch) -> None:
        """What a graph holds: the model over ids [height] and their batch, to the logits."""
        x_MH = self._model.hidden(ops.resolve_drawn(ids, self._drawn), self._pages, batch)
        logits = self._model.local_logits(x_MH)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits[: len(ids)].copy_(logits)

    def _cells(self, height: int, splits: int) -> int:
        """int32 values of a packed buffer."""
        return 6 * height + sum(a * b + (-a * b % _ALIGNED) for a, b in self._sizes(height, splits))

    def _capture(self, height: int, splits: int) -> _Bucket:
        cells = self._cells(height, splits)
        first, second = (torch.zeros(cells, dtype=torch.int32).pin_memory() for _ in range(2))
        self._pack(first, (), height, splits)
        device = first.to(self._device)
        ids, batch = self._views(device, height, splits)
        with torch.cuda.stream(self._stream):
            self._step(
                ids, batch
            )  # outside the capture first: libraries and kernels load what they need
        assert self._stream is not None
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            self._step(ids, batch)
        self._pool = graph.pool()
        events = torch.cuda.Event(), torch.cuda.Event()
        return _Bucket(height, splits, (first, second), events, device, graph)


def captures_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether decode steps become graphs; host staging (ranks that share a GPU) is no graph."""
    if device.type == "cpu" or config.enforce_eager or config.transport == "mpi":
        return False
    return ranks_per_gpu() == 1


def make_graphs(
    model: Decoder,
    pages: KeyValuePages,
    drawn: torch.Tensor,
    config: EngineConfig,
    context: int,
    capture: bool = True,
) -> DecodeGraphs:
    """The graphs an engine needs for sequences of up to `context` tokens; see `DecodeGraphs`."""
    rows, fixed = config.seats, config.fixed_batch or 0
    return DecodeGraphs(model, pages, drawn, rows, context, fixed, capture)


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
