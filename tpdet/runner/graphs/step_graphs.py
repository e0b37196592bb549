"""CUDA graphs of steps with prompt rows: prefill, chunks, and chunks beside decode rows.

Launching such a step kernel by kernel takes a slow host longer than the GPU takes to run it. It is
replayed from a graph captured at start for a bucket of rows and of attention splits, up to which
it is padded (`packed_step`): embedding and layers, as two micro-batches where exchanges overlap, to
the normed rows. The output head and the sampling follow one by one: which rows have logits varies.
"""

from collections.abc import Iterator

import numpy as np
import torch

from tpdet.control.plan import PlanRows
from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS
from tpdet.models.decoder import Decoder
from tpdet.models.micro_batches import first_micro_batch
from tpdet.runner.graphs.captured_steps import CapturedSteps
from tpdet.runner.graphs.packed_step import BatchShape, StepShape, StepSpans

LEAST_ROWS = 256
"""Of the smallest bucket: so few rows are done about as fast as one, the weights are read."""

_FINE = 8  # buckets between a power of two and the next: 512 prompt and 15 decode rows take 640
_ROUNDED = 128  # rows of a bucket are a multiple of it, unless they are the most there are
_FEWEST_SPLITS = 1024
_TIMES_SPLITS = 4  # pad splits cost little: a program that reads two numbers
_FEWEST_BLOCKS, _ROWS_A_BLOCK = 32, 64  # beside full ones: for the ends of sequences


class StepGraphs(CapturedSteps):
    """Graphs of steps with prompt rows, to the normed rows."""

    def run(self, rows: PlanRows) -> torch.Tensor | None:
        """Replay a step: the normed rows whose logits are wanted [R, H]; None if no bucket fits.

        None also where the first with room for the blocks of many short prompts has more than
        twice the rows.
        """
        total = int(rows.count.sum())
        spans = self._spans(rows, self._buckets[0][0])
        most = max(2 * total, self._buckets[0][0].rows)
        for shape, graph in self._buckets:
            parts = spans.within(shape) if total <= shape.rows <= most else None
            if parts is not None:
                hidden = self._replay(shape, graph, rows, parts)
                return hidden[self._wanted(rows, spans)]
        return None

    def _wanted(self, rows: PlanRows, spans: StepSpans) -> torch.Tensor:
        """Rows whose logits are wanted, int64 on the device."""
        logits = rows.logits
        ends = np.cumsum(logits)
        firsts = spans.first + spans.count - ends
        wanted = torch.from_numpy(np.arange(logits.sum()) + np.repeat(firsts, logits))
        if self._sampled.device.type == "cuda":
            wanted = wanted.pin_memory().to(self._sampled.device, non_blocking=True)
        return wanted

    def _result(self, model: Decoder, x_MH: torch.Tensor) -> torch.Tensor:
        return x_MH


def step_shapes(most_rows: int, max_running: int, width: int, overlapped: bool) -> list[StepShape]:
    """Shapes that graphs are captured for, ascending; tables have `width` pages.

    most_rows: of a step; max_running: sequences of a step, at most; overlapped:
    exchanges can overlap products.
    """
    coarse = _coarse_rows(most_rows)
    return [
        shape
        for rows in step_rows(most_rows)
        for shape in _shapes_of(rows, max_running, width, overlapped, rows in coarse)
    ]


def step_rows(most: int) -> list[int]:
    """Numbers of rows that graphs are captured for, ascending: `_FINE` for each power of two.

    They are multiples of `_ROUNDED`. Only the coarse ones have graphs for many splits too.
    """
    found, rows = _coarse_rows(most), LEAST_ROWS
    while rows < most:
        found.add(rows)
        rows += max((1 << rows.bit_length() - 1) // _FINE, _ROUNDED)
    return sorted(found)


def _coarse_rows(most: int) -> set[int]:
    """`most` times 1, 3/4, 1/2, 3/8, ... down to `LEAST_ROWS`."""
    found = {most}
    for halvings in range(most.bit_length()):
        for share in (most >> halvings, 3 * most >> (halvings + 2)):
            rows = -(-share // _ROUNDED) * _ROUNDED
            if rows >= LEAST_ROWS:
                found.add(min(rows, most))
    return found


def _shapes_of(
    rows: int, max_running: int, width: int, overlapped: bool, mixed: bool
) -> Iterator[StepShape]:
    """By splits, only the fewest unless `mixed`.

    Decode rows stand before prompts: in the second micro-batch none counts as short.
    """
    early = first_micro_batch(rows) if overlapped else rows
    sequences = min(max_running, early)
    for splits in list(_split_buckets(sequences * width))[: None if mixed else 1]:
        batches = [BatchShape(early, sequences, _blocks(early, sequences), splits, width)]
        if late := rows - early:
            sequences_late = min(max_running, late)
            blocks = _blocks(late, sequences_late)
            batches.append(BatchShape(late, sequences_late, blocks, 0, width))
        yield StepShape(tuple(batches))


def _blocks(rows: int, sequences: int) -> int:
    """Room for blocks: full ones, and the last of each of many sequences."""
    ends = min(sequences, max(_FEWEST_BLOCKS, rows // _ROWS_A_BLOCK))
    return -(-rows // BLOCK_TOKENS) + ends


def _split_buckets(most: int) -> Iterator[int]:
    """Numbers of attention splits: 1024, 4096, ... up to `most`."""
    splits = _FEWEST_SPLITS
    while splits < most:
        yield splits
        splits *= _TIMES_SPLITS
    yield most
