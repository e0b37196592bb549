"""From a step's logits to what the scheduler commits: tokens, prompt scores, failures."""

from collections.abc import Callable

import torch

from tpdet.kernels.shard import Shard
from tpdet.plan import Row, StepPlan
from tpdet.runner import draw_likeliest
from tpdet.sampler import Drawn, NumericalFailure, draw, finish, prompt_logprobs
from tpdet.sampling_row import RowKey, SampledToken, SamplingRow
from tpdet.scheduler.scheduler import Scheduler

LogitsTap = Callable[[Row, int, torch.Tensor], None]
"""Sees a plan row, the position of the first of its logits, and the fp32 logits [n, V]."""


class StepResults:
    """Takes one step's logits as they are launched, and has its results once it has run."""

    def __init__(self, plan: StepPlan, scheduler: Scheduler, tap: LogitsTap | None) -> None:
        self._tap = tap
        self._spans: list[tuple[int, Row]] = []
        first = 0
        for row in plan.rows:
            self._spans.append((first, row))
            first += row.logits
        self._scoring = {id(row): scheduler.scoring_row(row) for row in plan.rows if row.logits}
        self._sampling = {id(row): scheduler.sampling_row(row) for row in plan.rows if row.draws}
        self._drawn: list[tuple[list[SamplingRow], Drawn]] = []
        self.sampled: dict[RowKey, SampledToken] = {}
        self.scores: dict[RowKey, list[SampledToken]] = {}
        self.failures: dict[str, str] = {}

    @property
    def likeliest_only(self) -> bool:
        """Whether the step only draws the likeliest token of each row, and shows no logits."""
        return (
            self._tap is None
            and all(row.draws and row.logits == 1 for _, row in self._spans if row.logits)
            and all(row is not None and row.likeliest for row in self._sampling.values())
        )

    def take(self, first: int, logits: torch.Tensor) -> torch.Tensor:
        """Take fp32 logits [n, V] that stand at `first`, `first + 1`, ... of the step's.

        Returns the ids int64 of the tokens drawn from them, on their device.
        """
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
            if row.draws and high == begin + row.logits:
                drawing.append((row, high - 1 - first))
        rows = [sampling for row, _ in drawing if (sampling := self._sampling[id(row)])]
        if not rows:
            return logits.new_empty(0, dtype=torch.int64)
        indices = [index for _, index in drawing]
        if indices != list(range(len(logits))):
            logits = logits[indices]
        return self._keep(rows, draw(logits, rows))

    def take_shard(self, logits: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Take this rank's columns of every row's logits: each row draws its likeliest."""
        rows = [row for row in self._sampling.values() if row is not None]
        taken = sum(len(rows) for rows, _ in self._drawn)
        return self._keep(rows[taken : taken + len(logits)], draw_likeliest(logits, shard))

    def finish(self) -> None:
        """Read what was drawn; the step has run."""
        for rows, drawn in self._drawn:
            for row, result in zip(rows, finish(drawn), strict=True):
                if isinstance(result, NumericalFailure):
                    self.failures.setdefault(row.request_id, result.reason)
                else:
                    self.sampled[row.key] = result

    def _keep(self, rows: list[SamplingRow], drawn: Drawn) -> torch.Tensor:
        self._drawn.append((rows, drawn))
        return drawn.tokens

    def _score(self, row: Row, position: int, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow these positions."""
        wanted = self._scoring[id(row)]
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
