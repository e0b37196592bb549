"""Turns a step's logits into what the scheduler commits: tokens, prompt scores, failures."""

from collections import abc
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from tpdet.control.plan import (
    ByColumns,
    ByShares,
    LikeliestByColumns,
    Row,
    RowSampling,
    StepSampling,
    WholeRows,
)
from tpdet.control.row_messages import RowKey, SampledToken, ScoringRow
from tpdet.engine.pooling import PendingPooled, PromptRows, pool
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.runner import LogitBlock, RowSharing
from tpdet.sampling.sampler import (
    NumericalFailure,
    PendingSample,
    finish,
    prompt_logprobs,
    sample_columns,
    sample_likeliest,
)
from tpdet.scheduler.pending_steps import PendingStep
from tpdet.scheduler.rows import row_params
from tpdet.scheduler.sequence import Sequence

LogitsTap = abc.Callable[[Row, int, torch.Tensor], None]
"""Sees a plan row, the position of the first of its logits, and the fp32 logits [n, V]."""


class _LogitRow(NamedTuple):
    """Row `number` of the plan, with `logits` logits, the first of which is the step's `first`."""

    number: int
    first: int
    logits: int
    sequence: Sequence
    sampling: RowParams | None
    scoring: ScoringRow | None


class StepResults:
    """Takes the logits of one launched step, and has the step's results once it has run.

    processed: log-probabilities are of what is sampled from (`sampling/sampler.py`).
    """

    def __init__(self, step: PendingStep, tap: LogitsTap | None, processed: bool = False) -> None:
        self.step, self._tap, self._processed = step, tap, processed
        self._pending: list[tuple[list[Sequence], PendingSample]] = []
        self.sampled: dict[RowKey, SampledToken] = {}
        self.scores: dict[RowKey, list[SampledToken]] = {}
        self.runs: dict[RowKey, list[SampledToken]] = {}
        self.failures: dict[str, str] = {}
        self.pooled: list[PendingPooled] = []

    @cached_property
    def _logit_rows(self) -> list[_LogitRow]:
        """The rows with logits, in order; steps that sample one plain token a row need no list."""
        step = self.step
        firsts = accumulate(step.logits, initial=0)
        rows = enumerate(zip(firsts, step.logits, step.sequences, *step.wanted(), strict=False))
        return [_LogitRow(number, *row) for number, row in rows if row[1]]

    @cached_property
    def _sequences(self) -> list[Sequence]:
        """The sequence of each logit of the step, in order."""
        step = self.step
        rows = zip(step.sequences, step.logits, strict=True)
        if step.drafted:
            return [each for each, logits in rows for _ in range(logits)]
        return [each for each, logits in rows if logits]

    @cached_property
    def _samples_at_each(self) -> bool:
        """Whether every row with logits samples a token at each, and nothing is forbidden."""
        if self._tap is not None:
            return False
        step = self.step
        rows = zip(step.sequences, step.ends, step.samples, step.logits, strict=True)
        return all(
            logits == 0 or (logits == samples and end - logits + 1 >= sequence.free_from)
            for sequence, end, samples, logits in rows
        )

    @cached_property
    def _ends(self) -> list[int]:
        """The positions of the tokens of `_sequences`."""
        step = self.step
        rows = zip(step.ends, step.logits, strict=True)
        if step.drafted:
            return [end for last, count in rows for end in range(last - count + 1, last + 1)]
        return [end for end, logits in rows if logits]

    @cached_property
    def _lists_no_ids(self) -> bool:
        """Whether each row's token depends on its logits and a few numbers, and shows no logits."""
        return self._samples_at_each and all(sequence.plain for sequence in self._sequences)

    @cached_property
    def likeliest_only(self) -> bool:
        """Whether the step only samples each logits' likeliest token, and shows no logits."""
        return self._samples_at_each and all(sequence.likeliest for sequence in self._sequences)

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
        return ByShares(rows) if any(row.params.filtered for row in rows) else ByColumns(rows)

    def _row_samplings(self) -> tuple[RowSampling, ...]:
        """What other ranks must know to sample with rank 0; empty: they cannot."""
        if not self._lists_no_ids:
            return ()
        step = self.step
        rows = zip(step.sequences, step.logits, strict=True)
        return tuple([sequence.row_sampling for sequence, logits in rows if logits])

    def take(self, block: LogitBlock) -> torch.Tensor:
        """As TakeLogits."""
        first, logits, together, moved = block
        if together is None and not self._lists_no_ids:
            assert moved is None  # such rows follow no unverified drafts
            return self._take_whole(first, logits)
        # A token at each logits, so that the step's logits and its tokens have the same numbers.
        sequences = self._sequences[first : first + len(logits)]
        if together is None:
            if self.likeliest_only:
                shard = Shard(0, logits.shape[1])
                return self._keep(sequences, sample_likeliest(logits, shard))
            packed = b"".join([sequence.packed_sampling for sequence in sequences])
            params = PlainRows(packed, self._ends[first : first + len(logits)], moved)
            return self._keep(sequences, self._sample(logits, params, sequences))
        return self._keep(sequences, together(first, logits, moved))

    def _take_whole(self, first: int, logits: torch.Tensor) -> torch.Tensor:
        last, step = first + len(logits), self.step
        params: list[RowParams] = []
        sequences: list[Sequence] = []
        indices: list[int] = []
        prompts: list[PromptRows] = []
        for row in self._logit_rows:
            low, high = max(first, row.first), min(last, row.first + row.logits)
            if low >= high:
                continue
            row_end, plan_end = row.first + row.logits - 1, step.ends[row.number]
            pools = row.sequence.request.pooling is not None
            if self._tap is not None or row.scoring is not None or pools:
                part, position = logits[low - first : high - first], plan_end - 1 - (row_end - low)
                if self._tap is not None:
                    self._tap(step.plan.rows[row.number], position, part.cpu())
                if row.scoring is not None:
                    self._score(row.scoring, position, part)
                if pools:
                    prompts.append(PromptRows(row.sequence, position, part))
            if row.sampling is None:
                continue
            drafted, known = step.drafted.get(row.sequence.key, 0), None
            if drafted and row.sequence.penalises:
                known = np.array(row.sequence.tokens, np.int64)
            sampled = row_end - drafted
            for index in range(max(low, sampled), high):
                drafts_behind = row_end - index
                params.append(
                    row_params(row.sequence, plan_end - drafts_behind, known)
                    if drafts_behind
                    else row.sampling
                )
                sequences.append(row.sequence)
                indices.append(index - first)
        if prompts and (pooled := pool(prompts)) is not None:
            self.pooled.append(pooled)
        if not params:
            return logits.new_empty(0, dtype=torch.int64)
        if indices != list(range(len(logits))):
            logits = logits[indices]
        return self._keep(sequences, self._sample(logits, params, sequences))

    def pages(self) -> dict[tuple[str, int], tuple[tuple[int, ...], int]]:
        """By request and choice, before the step is committed: pages, and where its token stands.

        Of a row with drafts the first of its tokens.
        """
        step = self.step
        return {
            (each.request_id, each.choice): (each.pages, end - step.drafted.get(each.key, 0))
            for each, end in zip(step.sequences, step.ends, strict=True)
        }

    def finish(self) -> None:
        """Read what was sampled; the step has run."""
        drafted = self.step.drafted
        without: set[RowKey] = set()  # rows with drafts in which a position has no token
        for sequences, pending in self._pending:
            for sequence, result in zip(sequences, finish(pending), strict=True):
                if sequence.key in self.step.void:
                    continue
                if drafted and sequence.key in drafted:
                    if type(result) is not SampledToken:
                        without.add(sequence.key)
                    elif sequence.key not in without:
                        self.runs.setdefault(sequence.key, []).append(result)
                    continue
                if type(result) is SampledToken:
                    self.sampled[sequence.key] = result
                elif isinstance(result, NumericalFailure):
                    self.failures.setdefault(sequence.request_id, result.reason)

    def _keep(self, sequences: list[Sequence], pending: PendingSample) -> torch.Tensor:
        self._pending.append((sequences, pending))
        return pending.tokens

    def _sample(
        self, logits: torch.Tensor, params: abc.Sequence[RowParams], sequences: list[Sequence]
    ) -> PendingSample:
        beside = [sequence.beside for sequence in sequences]
        shard = Shard(0, logits.shape[1])
        return sample_columns(logits, params, beside, shard, self._processed)

    def _score(self, row: ScoringRow, position: int, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow these positions."""
        skip = position - row.start
        targets = row.target_ids[max(skip, 0) : skip + len(logits)]
        if not targets:
            return
        results = prompt_logprobs(logits[: len(targets)], targets, row.beside)
        for result in results:
            if isinstance(result, NumericalFailure):
                self.failures.setdefault(row.request_id, result.reason)
            else:
                self.scores.setdefault(row.key, []).append(result)
