"""From a step's logits to what the scheduler commits: tokens, prompt scores, failures."""

from collections.abc import Callable

import torch

from tpdet.plan import Row, StepPlan
from tpdet.sampler import NumericalFailure, prompt_logprobs, sample
from tpdet.sampling_row import RowKey, SampledToken
from tpdet.scheduler.scheduler import Scheduler

LogitsTap = Callable[[Row, int, torch.Tensor], None]
"""Sees a plan row, the position of the first of its logits, and the fp32 logits [n, V]."""


class StepResults:
    """Collects one step's results as blocks of logits come in, in the rows' order."""

    def __init__(self, plan: StepPlan, scheduler: Scheduler, tap: LogitsTap | None) -> None:
        self._scheduler = scheduler
        self._tap = tap
        self._spans: list[tuple[int, Row]] = []
        first = 0
        for row in plan.rows:
            self._spans.append((first, row))
            first += row.logits
        self.sampled: dict[RowKey, SampledToken] = {}
        self.scores: dict[RowKey, list[SampledToken]] = {}
        self.failures: dict[str, str] = {}

    def take(self, first: int, logits: torch.Tensor) -> None:
        """Take fp32 logits [n, V] that stand at `first`, `first + 1`, ... of the step's."""
        last = first + len(logits)
        drawing = []
        for begin, row in self._spans:
            low, high = max(first, begin), min(last, begin + row.logits)
            if low >= high:
                continue
            mine = logits[low - first : high - first]
            position = row.start + len(row.token_ids) - row.logits + (low - begin)
            if self._tap is not None:
                self._tap(row, position, mine.cpu())
            self._score(row, position, mine)
            if high == begin + row.logits:
                drawing.append((row, high - 1 - first))
        self._draw(drawing, logits)

    def _score(self, row: Row, position: int, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow these positions."""
        wanted = self._scheduler.scoring_row(row)
        if wanted is None:
            return
        skip = position - wanted.start
        targets = wanted.target_ids[max(skip, 0) : skip + len(logits)]
        if not targets:
            return
        results = prompt_logprobs(logits[: len(targets)], targets, wanted.top)
        for result in results:
            if isinstance(result, NumericalFailure):
                self.failures.setdefault(wanted.request_id, result.reason)
            else:
                self.scores.setdefault(wanted.key, []).append(result)

    def _draw(self, drawing: list[tuple[Row, int]], logits: torch.Tensor) -> None:
        """Sample the rows whose last logits are in this block."""
        wanted = [(self._scheduler.sampling_row(row), index) for row, index in drawing]
        rows = [(row, index) for row, index in wanted if row is not None]
        if not rows:
            return
        results = sample(logits[[index for _, index in rows]], [row for row, _ in rows])
        for (row, _), result in zip(rows, results, strict=True):
            if isinstance(result, NumericalFailure):
                self.failures.setdefault(row.request_id, result.reason)
            else:
                self.sampled[row.key] = result
