"""CUDA graphs of decode steps: one launch instead of hundreds, and not one bit changed.

A decode step (one token a row, logits of each) is replayed from a graph captured at start for a
bucket of rows and of attention splits. Rows and splits are padded up to the bucket: pad rows read
token 0 and write to a scratch page that no sequence owns, pad splits belong to a sequence without
rows. A row's bits depend on neither (docs/numerics.md, section 8).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.kernels.paged_batch import PagedBatch, PagedSequence
from tpdet.models.decoder import Decoder
from tpdet.plan import Row

MAX_ROWS = 256
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ALIGNED = 4  # int32 values in 16 bytes: kernels are specialised on that


@dataclass(frozen=True)
class _Bucket:
    """A captured graph and the buffers it reads."""

    rows: int
    splits: int
    host: torch.Tensor
    device: torch.Tensor
    copied: torch.cuda.Event
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Graphs of one model over one KV cache, whose last page is the scratch page."""

    def __init__(
        self,
        model: Decoder,
        pages: KeyValuePages,
        device: torch.device,
        max_rows: int,
        context: int,
    ) -> None:
        """Capture every bucket; alike on every rank, for the graphs hold the collectives."""
        self._model = model
        self._pages = pages
        self._device = device
        self._scratch = pages.layers[0].keys.shape[0] - 1
        self._width = -(-context // PAGE_TOKENS)
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._logits: torch.Tensor | None = None  # [largest, V] fp32, every graph writes here
        self._buckets: list[_Bucket] = []
        largest = min(max_rows, MAX_ROWS)
        heights = sorted({*(n for n in _ROWS if n < largest), largest})
        for rows in reversed(heights):  # largest first: the others fit into its memory
            for splits in reversed(list(_split_buckets(rows, self._width))):
                self._buckets.append(self._capture(rows, splits))
        self._buckets.reverse()

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether a step's rows are all decode rows and not too many."""
        return (
            len(rows) <= self._buckets[-1].rows
            and all(len(row.token_ids) == 1 and row.logits == 1 for row in rows)
        )  # fmt: skip

    def run(self, rows: Sequence[Row]) -> torch.Tensor:
        """Replay a step: fp32 logits [len(rows), V], valid until the next call."""
        needed = sum(row.start // PAGE_TOKENS + 1 for row in rows)
        bucket = next(b for b in self._buckets if b.rows >= len(rows) and b.splits >= needed)
        bucket.copied.synchronize()  # the last copy out of the host buffer is done
        bucket.host.copy_(self._packed(rows, bucket.rows, bucket.splits))
        bucket.device.copy_(bucket.host, non_blocking=True)
        bucket.copied.record()
        bucket.graph.replay()
        assert self._logits is not None
        return self._logits[: len(rows)]

    def _packed(self, rows: Sequence[Row], height: int, splits: int) -> torch.Tensor:
        """A step's integers in the layout of `_views`; sequence `height` has no rows."""
        pad = height - len(rows)
        ids = [row.token_ids[0] for row in rows] + [0] * pad
        positions = [row.start for row in rows] + [0] * pad
        slots = [row.pages[row.start // PAGE_TOKENS] * PAGE_TOKENS + row.start % PAGE_TOKENS
                 for row in rows]  # fmt: skip
        slots += [self._scratch * PAGE_TOKENS + i % PAGE_TOKENS for i in range(pad)]
        tables: list[int] = []
        spans: list[int] = []
        pairs: list[int] = []
        short: list[int] = []
        for index, row in enumerate(rows):
            tables += row.pages[: self._width]
            tables += [self._scratch] * (self._width - len(row.pages))
            spans += (index, 1, row.start)
            short += (index, len(pairs) // 2)
            for split in range(row.start // PAGE_TOKENS + 1):
                pairs += (index, split)
        tables += [self._scratch] * (self._width * (height + 1 - len(rows)))
        spans += [0, 0, 0] * (height + 1 - len(rows))
        pairs += [height, 0] * (splits - len(pairs) // 2)
        short += [height, 0] * pad
        wide = torch.tensor(ids + positions + slots, dtype=torch.int64).view(torch.int32)
        parts = [wide]
        for values in (tables, spans, pairs, short):
            parts.append(torch.tensor(values + [0] * (-len(values) % _ALIGNED), dtype=torch.int32))
        return torch.cat(parts)

    def _views(
        self, packed: torch.Tensor, height: int, splits: int
    ) -> tuple[torch.Tensor, PagedBatch]:
        """Ids [rows] and the batch as views of a packed buffer."""
        sizes = [2 * height] * 3 + [
            (height + 1) * self._width, (height + 1) * 3, splits * 2, height * 2,
        ]  # fmt: skip
        views, begin = [], 0
        for index, size in enumerate(sizes):
            views.append(packed[begin : begin + size])
            begin += size + (-size % _ALIGNED if index > 2 else 0)
        ids, positions, slots = (view.view(torch.int64) for view in views[:3])
        dummy = tuple(PagedSequence(i, 1, 0, (self._scratch,)) for i in range(height))
        batch = PagedBatch(
            sequences=dummy,
            positions=positions,
            slots=slots,
            tables=views[3].view(height + 1, self._width),
            rows=views[4].view(height + 1, 3),
            blocks=views[3].new_empty(0, 2),
            splits=views[5].view(splits, 2),
            short=views[6].view(height, 2),
            short_rows=1,
        )
        return ids, batch

    def _capture(self, height: int, splits: int) -> _Bucket:
        host = self._packed((), height, splits).pin_memory()
        device = host.to(self._device)
        ids, batch = self._views(device, height, splits)

        def step() -> None:
            logits = self._model.logits(self._model.hidden(ids, self._pages, batch))
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            self._logits[:height].copy_(logits)

        with torch.cuda.stream(self._stream):
            step()  # outside the capture first: libraries and kernels load what they need
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            step()
        self._pool = graph.pool()
        return _Bucket(height, splits, host, device, torch.cuda.Event(), graph)


def _split_buckets(rows: int, width: int) -> Iterator[int]:
    """Numbers of attention splits for `rows` rows: rows times 1, 2, 4, ... up to `width` pages."""
    pages = 1
    while pages < width:
        yield rows * pages
        pages *= 2
    yield rows * width


def wait_for_gpu(device: torch.device, timeout: float) -> bool:
    """Wait until the GPU has done what was launched; False if `timeout` seconds pass first.

    A lost peer leaves a collective's kernel spinning: a plain synchronisation would never return.
    """
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + timeout
    spin_until = time.monotonic() + 0.02
    while not done.query():
        now = time.monotonic()
        if now > deadline:
            return False
        if now > spin_until:
            time.sleep(0.0005)
    return True
