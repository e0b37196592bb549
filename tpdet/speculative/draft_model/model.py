"""The draft model: a second, small model on rank 0's device, which guesses what sequences sample.

It is a world of its own with one rank, its own KV pages and its own page table. For each sequence
that it drafts for it has a copy. To draft, it computes the tokens that a copy lacks, and then one
token of every copy a step. It samples with the request's seed, positions and filters, so that equal
distributions draw equal tokens.

What it proposes is verified like any draft (docs/speculative.md), so none of this reaches a bit.
"""

from collections import abc
from itertools import takewhile

import torch

from tpdet.control.plan import PLAN_VERSION, StepPlan
from tpdet.control.row_messages import RowKey
from tpdet.runner import Runner
from tpdet.runner.graphs.draft_graphs import USUAL_SEQUENCES
from tpdet.runner.step.gpu_wait import wait_for_event
from tpdet.scheduler.rows import plan_rows
from tpdet.scheduler.sequence import Sequence, pages_for
from tpdet.speculative.draft_model.copies import DraftCopies
from tpdet.speculative.draft_model.steps import SHORT, DraftStep, LaterSteps
from tpdet.speculative.draft_model.times import DraftTimes

Fallback = abc.Callable[[Sequence, list[int]], list[int]]
"""What to say of a sequence in place of these drafts."""


class DraftModel:
    """A loaded draft model. `runner` has a world of one rank; its pages are not in use.

    Its steps run between those of the engine, on the same stream: nothing of one meets the other.
    """

    def __init__(self, runner: Runner, vocabulary: int) -> None:
        """vocabulary: token ids of the model that it drafts for, perhaps more or fewer than its."""
        self.runner, self._vocabulary = runner, vocabulary
        self._copies = DraftCopies(runner.num_pages, runner.model_config.vocab_size)
        self.times = DraftTimes(runner.loaded.config.step_timeout)
        self._step = 0
        self._chain = runner.decode_chain()
        if self._chain is not None:
            width = pages_for(runner.max_model_len)
            self._chain.capture(runner.loaded.config.max_running, width, SHORT)

    def captures(self, sequences: int) -> bool:
        """Whether the first drafts of so many sequences may have to capture graphs."""
        return self._chain is not None and sequences > USUAL_SEQUENCES

    def lags(self, sequence: Sequence) -> bool:
        """Whether the copy of a sequence lacks more tokens than a usual step computes."""
        return self._copies.lacking(sequence) > SHORT

    def draft(
        self, requests: abc.Sequence[tuple[Sequence, int]], fallback: Fallback | None = None
    ) -> list[list[int]]:
        """At most so many drafts behind the known tokens of each sequence; [] where room is short.

        A prompt that is longer than a step is computed over several calls, which give no drafts.
        fallback: for benchmarks, says others in place of a sequence's drafts, as if sampled.
        Raises NumericalError for NaN in its logits, and TimeoutError where a step or the call took
        longer than it may. What a GPU still computes then ends before the engine's next step.
        """
        self.times.begin(len(requests))
        copies, counts = self._reserve(requests)
        known = {key: len(copy.tokens) for key, copy in copies.items()}
        rows = self._share_budget(copies, counts)
        steps: list[DraftStep] = []
        later = None if self._chain is None else LaterSteps(self._chain, self._copies.pages.table)
        while rows:
            behind = later if steps else None
            steps.append(self._launch([copies[key] for key in rows], [*rows.values()], behind))
            if len(steps) > 1:
                self._wait(steps[-2], urgent=False)
            rows = {key: 1 for key in copies if counts.get(key, 0) > len(steps)}
        if later is not None:
            later.end()
        if steps:
            self._wait(steps[-1], urgent=True)
        for step in steps:
            step.write()
        self.times.finish()
        drafts: list[list[int]] = []
        for target, _ in requests:
            key = target.key
            drafted = copies[key].tokens[known[key] :] if key in counts else []
            if key in counts and fallback is not None:
                drafted = fallback(target, drafted)
                copies[key].tokens[known[key] :] = drafted
            drafts.append(list(takewhile(lambda token: token < self._vocabulary, drafted)))
        return drafts

    def forget(self, key: RowKey) -> None:
        """Give back the pages of a sequence, which may be unknown."""
        self._copies.forget(key)

    def close(self) -> None:
        """Let go of graphs, pages and weights."""
        self._chain = None
        self.runner.close()

    def _reserve(
        self, requests: abc.Sequence[tuple[Sequence, int]]
    ) -> tuple[dict[RowKey, Sequence], dict[RowKey, int]]:
        """The copies that have pages for their drafts, by key in order, and how many drafts."""
        counts: dict[RowKey, int] = {}
        copies: dict[RowKey, Sequence] = {}
        for target, most in requests:
            count = min(most, self.runner.max_model_len + 1 - len(target.tokens))
            if count > 0 and (copy := self._copies.follow(target)) is not None:
                copies[target.key], counts[target.key] = copy, count
        reserved = {
            key: copies[key]
            for key in sorted(copies)
            if self._copies.reserve(copies[key], counts[key], copies)
        }
        return reserved, {key: counts[key] for key in reserved}

    def _share_budget(
        self, copies: dict[RowKey, Sequence], counts: dict[RowKey, int]
    ) -> dict[RowKey, int]:
        """Tokens that the first step computes of each copy: those with the fewest go first.

        A copy that gets fewer tokens than it lacks is taken out of `counts`: it has no drafts.
        """
        lacking = {key: len(copy.tokens) - copy.computed for key, copy in copies.items()}
        budget = self.runner.step_tokens.most
        for key in sorted(copies, key=lambda key: (lacking[key], key)):
            budget -= (taken := min(lacking[key], budget))
            if taken < lacking[key]:
                del counts[key]
            lacking[key] = taken
        return {key: count for key, count in lacking.items() if count}

    def _launch(
        self, copies: list[Sequence], counts: list[int], later: LaterSteps | None
    ) -> DraftStep:
        """Start a step that computes the next tokens of copies, in the order of their keys.

        later: of a step behind the call's first, if there are graphs.
        """
        if later is not None and (chained := later.launch(copies)) is not None:
            return self._launched(chained, self.runner.event())
        for copy, count in zip(copies, counts, strict=True):
            # As a row with a draft, so that it goes through the graphs of such rows.
            ends = copy.computed + count == len(copy.tokens)
            copy.drafted = 1 if count == SHORT and ends else 0
        rows, pages = plan_rows(copies, counts), self._copies.pages
        events, digest = pages.take_events(), pages.table.digest()
        plan = StepPlan(PLAN_VERSION, self._step, events, rows, digest, feeds=True)
        self._step += 1
        step = DraftStep(copies, counts, rows.samples.tolist(), chain=self._chain)
        return self._launched(step, self.runner.launch(plan, step))

    def _launched(self, step: DraftStep, event: torch.cuda.Event | None) -> DraftStep:
        step.event = event
        if event is None:  # a CPU has computed it
            self.times.end(step.is_short, sequences=step.rows)
        return step

    def _wait(self, step: DraftStep, urgent: bool) -> None:
        """Wait for a step on a GPU, no longer than it may take."""
        if step.event is not None:
            left = self.times.left(step.is_short)
            in_time = wait_for_event(step.event, left, urgent)
            self.times.end(step.is_short, in_time, step.rows)
