"""Turns a step's logits into what the scheduler commits: tokens, prompt scores, failures."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch

from tpdet.control.plan import (
    ByColumns,
    ByShares,
    LikeliestByColumns,
    Row,
    RowSampling,
    StepPlan,
    StepSampling,
    WholeRows,
)
from tpdet.control.sampling_row import RowKey, SampledToken, SamplingRow, ScoringRow
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.runner import RowSharing, SampleTogether
from tpdet.sampling.sampler import (
    NumericalFailure,
    PendingSample,
    begin_sampling,
    finish,
    prompt_logprobs,
    sample_likeliest,
)
from tpdet.scheduler.scheduler import Scheduler

LogitsTap = Callable[[Row, int, torch.Tensor], None]
"""Sees a plan row, the position of the first of its logits, and the fp32 logits [n, V]."""


class _Wanted(NamedTuple):
    """A row with logits, the first of which stands at `first` of the step's."""

    first: int
    row: Row
    sampling: SamplingRow | None
    scoring: ScoringRow | None


class StepResults:
    """Takes the logits of one launched step, and has the step's results once it has run."""

    def __init__(self, plan: StepPlan, scheduler: Scheduler, tap: LogitsTap | None) -> None:
        self._tap = tap
        self._wanted: list[_Wanted] = []
        first = 0
        for row, sampling, scoring in zip(plan.rows, *scheduler.wanted(plan), strict=True):
            if row.logits:
                self._wanted.append(_Wanted(first, row, sampling, scoring))
                first += row.logits
        self._pending: list[tuple[list[SamplingRow], PendingSample]] = []
        self.sampled: dict[RowKey, SampledToken] = {}
        self.scores: dict[RowKey, list[SampledToken]] = {}
        self.failures: dict[str, str] = {}

    @cached_property
    def likeliest_only(self) -> bool:
        """Whether the step only samples the likeliest token of each row, and shows no logits."""
        return self._tap is None and all(
            wanted.sampling is not None and wanted.row.logits == 1 and wanted.sampling.likeliest
            for wanted in self._wanted
        )

    def sampling(self, sharing: RowSharing) -> StepSampling:
        """How the step samples: together if the ranks can, else rank 0 from whole rows."""
        if not sharing.several:
            return WholeRows()
        if self.likeliest_only:
            return LikeliestByColumns()
        rows = self._row_samplings() if sharing.open else ()
        if not rows:
            return WholeRows()
        # Each way is the faster one for its rows: with top-k or top-p they are needed whole.
        return ByShares(rows) if any(row.filtered for row in rows) else ByColumns(rows)

    def _row_samplings(self) -> tuple[RowSampling, ...]:
        """What other ranks must know to sample with rank 0; empty: they cannot."""
        if self._tap is not None:
            return ()
        found: list[RowSampling] = []
        for wanted in self._wanted:
            if wanted.sampling is None or wanted.row.logits != 1 or not wanted.sampling.plain:
                return ()
            how = wanted.sampling.params
            found.append(
                RowSampling(
                    wanted.sampling.seed,
                    how.temperature,
                    how.top_k,
                    how.top_p,
                    how.min_p,
                    how.logprobs,
                )
            )
        return tuple(found)

    def take(
        self, first: int, logits: torch.Tensor, together: SampleTogether | None
    ) -> torch.Tensor:
        """Take fp32 logits [n, W] that stand at `first`, `first + 1`, ... of the step's.

        Whole rows (W = V), or this rank's columns where ranks sample `together`. Returns the ids
        int64 of the sampled tokens, on their device.
        """
        if together is None and not self.likeliest_only:
            return self._take_whole(first, logits)
        # One token a row, so that the step's logits and its tokens have the same numbers.
        rows = [one.sampling for one in self._wanted if one.sampling is not None]
        rows = rows[first : first + len(logits)]
        if together is None:
            return self._keep(rows, sample_likeliest(logits, Shard(0, logits.shape[1])))
        return self._keep(rows, together(first, logits))

    def _take_whole(self, first: int, logits: torch.Tensor) -> torch.Tensor:
        last = first + len(logits)
        rows: list[SamplingRow] = []
        indices: list[int] = []
        for begin, row, sampling, scoring in self._wanted:
            low, high = max(first, begin), min(last, begin + row.logits)
            if low >= high:
                continue
            if self._tap is not None or scoring is not None:
                mine = logits[low - first : high - first]
                position = row.start + len(row.token_ids) - row.logits + (low - begin)
                if self._tap is not None:
                    self._tap(row, position, mine.cpu())
                if scoring is not None:
                    self._score(scoring, position, mine)
            if sampling is not None and high == begin + row.logits:
                rows.append(sampling)
                indices.append(high - 1 - first)
        if not rows:
            return logits.new_empty(0, dtype=torch.int64)
        if indices != list(range(len(logits))):
            logits = logits[indices]
        return self._keep(rows, begin_sampling(logits, rows))

    def finish(self) -> None:
        """Read what was sampled; the step has run."""
        for rows, pending in self._pending:
            for row, result in zip(rows, finish(pending), strict=True):
                if isinstance(result, NumericalFailure):
                    self.failures.setdefault(row.request_id, result.reason)
                else:
                    self.sampled[row.key] = result

    def _keep(self, rows: list[SamplingRow], pending: PendingSample) -> torch.Tensor:
        self._pending.append((rows, pending))
        return pending.tokens

    def _score(self, wanted: ScoringRow, position: int, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow these positions."""
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
