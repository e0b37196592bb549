"""The scheduler: continuous batching, first come first served, on rank 0 alone.

A step has three parts: `plan = schedule()`, every rank runs the plan, `commit(plan.step, sampled)`.
The next step may be planned while one runs (`schedule_ahead`); steps are committed in order.

Decoding sequences go first; chunks of prompts take the rest of the token budget. A waiting sequence
starts to run when there are free pages for all its known tokens (pages that it finds in the prefix
cache need none). It grows by one page at a time while it decodes. When no page is left, the latest
running sequence (highest choice first) gives up its pages and returns to the head of the waiting
queue. Its tokens are kept: they are recomputed, or found in the prefix cache, as a longer prompt.

No request starves. The first sequence in the total order is never preempted while another one runs.
No sequence overtakes the head of the waiting queue. A request that could not fit alone is refused.
"""

from collections import abc

import msgspec

from tpdet.cache.state_table import StateRoom
from tpdet.control.plan import NO_ROWS, PLAN_VERSION, PlanRows, StepPlan
from tpdet.control.row_messages import RowKey, SampledToken
from tpdet.control.step_seconds import StepSeconds
from tpdet.errors import IntegrityError, NumericalError
from tpdet.grammar.constraint import Constraint
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.requests.answer_form import AnswerForm
from tpdet.requests.request import Request, RequestFailed, TokenOutput
from tpdet.scheduler.pending_steps import PendingStep, PendingSteps
from tpdet.scheduler.policy import Policy
from tpdet.scheduler.prompt_budget import PromptBudget
from tpdet.scheduler.request_table import RequestTable
from tpdet.scheduler.results import (
    Output,
    Runs,
    StepOrigin,
    check_results,
    ended_early,
    forget_prompt_scores,
    mark_old_keys,
    plain_output,
    take_results,
    take_run,
)
from tpdet.scheduler.rows import plan_rows
from tpdet.scheduler.sequence import Sequence, follow_drafts, unverified_drafts
from tpdet.scheduler.speculator import Speculator
from tpdet.scheduler.statistics import SchedulerStatistics, Totals, take_statistics


class Scheduler:
    """Decides every step. All its methods must be called from one thread."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_pages: int,
        max_queue: int,
        max_model_len: int,
        preempt_every: int = 0,
        prefix_identity: bytes | None = None,
        constrain: abc.Callable[[AnswerForm], Constraint] | None = None,
        mixed_step_tokens: int | None = None,
        step_seconds: StepSeconds | None = None,
        speculator: Speculator | None = None,
        state_room: StateRoom | None = None,
        follows_drafts: bool = False,
    ) -> None:
        """The limits are counts of sequences, of tokens a step, of pages, of requests, of tokens.

        preempt_every: k > 0 preempts, at every k-th step, each sequence that got a token since it
        last began to run; a test that answers do not depend on it. prefix_identity: names the
        weights and the contract under which pages are shared; None shares none. constrain: makes a
        constraint of an answer's form, or raises RequestError. mixed_step_tokens: of a step where
        sequences decode, at most; None: as many as of any other. step_seconds: by which prompts are
        cut finer in such a step; None: they are not. speculator: drafts for rows; None: no row
        carries drafts. state_room: slots of linear-attention states, one of which each running
        sequence has; None: the model has no such layers. follows_drafts: a step that is planned
        ahead may have rows behind drafts that the pending one verifies.
        """
        self.preempt_every = preempt_every
        self.policy = Policy(
            max_num_seqs, max_num_batched_tokens, num_pages, prefix_identity, state_room
        )
        self.policy.mixed_step_tokens = mixed_step_tokens or max_num_batched_tokens
        if step_seconds is not None:
            self.policy.prompt_budget = PromptBudget(step_seconds)
        self.speculator = speculator or Speculator()
        self._requests = RequestTable(max_queue, max_model_len, constrain)
        self._pending = PendingSteps()
        self._next_step = 0
        self._totals = Totals()
        self.frozen = False
        """No step is planned: requests, running and new, stay where they are."""
        self._marks_old_keys = False
        self.follows_drafts = follows_drafts

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step is not committed."""
        return bool(self._requests) or bool(self._pending)

    def add(self, request: Request) -> None:
        """Queue `request` as `n` sequences under the next admission number.

        Raises RequestError for a request that can never run, whose schema cannot be used or whose
        id is in use; OverloadedError when `max_queue` requests wait already.
        """
        sequences = self._requests.add(request, self.policy.page_manager.num_pages)
        for sequence in sequences:
            sequence.may_follow = (
                self.follows_drafts and sequence.plain and not sequence.reads_always
            )
            self.policy.waiting.put(sequence)
        self.speculator.admit(request, sequences)
        self._totals.requests_added += 1
        self._totals.prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str, choice: int | None = None) -> list[TokenOutput]:
        """End a request whose reader has gone, or one choice that its reader saw complete.

        May be called at any time; unknown ids are ignored. If a pending step computes a row of a
        sequence, its pages are released when that step is committed. Returns the last output of
        each choice that it ended, for a reader that is still there.
        """
        sequences = self._requests.live(request_id, choice)
        for sequence in sequences:
            self._retire(sequence)
            if choice is None and request_id not in self._requests:
                self._totals.requests_aborted += 1
        return [ended_early(sequence) for sequence in sequences]

    def fail(self, request_id: str, code: str, message: str) -> RequestFailed | None:
        """End a request with an error for its reader; None when it has ended already.

        May be called at any time. A numerical error marks its pages NAN.
        """
        sequences = self._requests.live(request_id)
        if not sequences:
            return None
        for sequence in sequences:
            sequence.poisoned = code == NumericalError.code
            self._retire(sequence)
        self._totals.requests_failed += 1
        return RequestFailed(request_id, code, message)

    def schedule(self) -> StepPlan | None:
        """The next step, None if nothing runs. Raises IntegrityError while one is pending."""
        self._pending.refuse_any()
        self._preempt_on_demand()
        return self._begin()

    def schedule_ahead(self) -> StepPlan | None:
        """The step after the pending one, planned before its results are known; None to wait.

        It leaves out the sequences whose next row depends on those results (`awaits_results`). A
        row behind drafts begins where the pending step says, on the device (`Row.unverified`).
        None while two steps are pending or none is, when many sequences would be left out, when
        pages are short, and when a preemption is due.
        """
        if len(self._pending) != 1 or self._preemption_is_due:
            return None
        self.policy.follow_drafts()
        return self._begin() if self.policy.may_run_ahead else None

    def _begin(self) -> StepPlan | None:
        """Plan the next tokens of each sequence, and make that step pending.

        Drafts get what is left of the budget, and no page: a row is never delayed by them.
        """
        if self.frozen:
            return None
        counts, budget = self.policy.choose()
        if not counts:
            return None
        running = self.policy.running
        self.speculator.propose(running, counts, budget)
        chosen = list(running) if len(counts) == len(running) else running.having(counts)
        for sequence in chosen:
            if unverified_drafts(sequence) and not sequence.expected:
                follow_drafts(sequence, ())
        self._requests.started(chosen)
        pages, tokens = self.policy.page_manager, [counts[sequence.key] for sequence in chosen]
        pages.take_snapshots(chosen)
        plan = self._plan(plan_rows(chosen, tokens, pages.leave_snapshots(chosen, tokens)))
        self._pending.begin(plan, chosen)
        self._totals.batches += 1
        self._totals.batched_rows += len(chosen)
        return plan

    def heartbeat(self, stop: bool = False) -> StepPlan:
        """A plan without rows, which carries the page events so far; it needs no commit.

        Raises IntegrityError while a step is pending.
        """
        self._pending.refuse_any()
        return self._plan(NO_ROWS, stop)

    def latest(self, plan: StepPlan) -> PendingStep:
        """The step of the latest plan, with the sequence of each of its rows."""
        return self._pending.latest(plan)

    def commit(
        self,
        step: int,
        sampled: abc.Mapping[RowKey, SampledToken],
        prompt_scores: abc.Mapping[RowKey, abc.Iterable[SampledToken]] | None = None,
        approximate: bool = False,
        runs: Runs | None = None,
        weights: int = 0,
    ) -> list[Output]:
        """Take the results of step number `step`, the oldest pending one.

        Returns the outputs for readers, in row order. `sampled` has a token for each row that
        samples one (see `wanted`), `prompt_scores` the scored targets of each row that scores any;
        `approximate` and `weights` mark the outputs. `runs` has the tokens of each row with drafts.
        Raises IntegrityError, before anything is changed, when the step or a key does not fit. A
        request whose token would end it before `min_tokens` fails alone.
        """
        pending = self._pending.oldest(step)
        scores = {key: tuple(tokens) for key, tokens in (prompt_scores or {}).items()}
        runs, drafted = runs or {}, pending.drafted
        check_results(pending, sampled, scores, runs)
        origin = StepOrigin(approximate, weights)
        for sequence in self._pending.commit_oldest():
            self.policy.page_manager.release(sequence)
        outputs: list[Output] = []
        self._totals.computed_tokens += int(pending.plan.rows.count.sum())
        plain = 0
        rows = zip(pending.sequences, pending.ends, pending.logits, strict=True)
        for sequence, end, logits in rows:
            if sequence.finished or sequence.key in pending.void:
                continue
            if drafted and sequence.key in drafted:
                outputs += self._commit_run(sequence, end, runs.get(sequence.key, ()), origin)
                continue
            token = sampled.get(sequence.key)
            shares = logits and end // PAGE_TOKENS > sequence.prefix.offered
            if token is not None and not shares:
                output = plain_output(sequence, end, token, origin)
                if output is not None:  # by far the most rows
                    outputs.append(output)
                    plain += 1
                    continue
            results = take_results(sequence, end, token, scores, origin)
            # Finite logits prove every position before them sound; without any, no proof.
            if shares and not any(isinstance(it, RequestFailed) for it in results):
                self.policy.page_manager.share(sequence, end)
            for result in results:
                self._follow(sequence, result)
                outputs.append(result)
        self._totals.generated_tokens += plain
        return mark_old_keys(outputs, pending.sequences) if self._marks_old_keys else outputs

    def _commit_run(
        self, sequence: Sequence, end: int, run: abc.Sequence[SampledToken], origin: StepOrigin
    ) -> list[Output]:
        """Commit a row with drafts; pages are shared up to the committed end only."""
        drafted = sequence.drafted
        outputs, lacks_token = take_run(sequence, end, run, origin)
        accepted = max(len(outputs) - 1, 0)
        self._totals.draft_tokens += drafted
        self._totals.accepted_draft_tokens += accepted
        self.speculator.learn(sequence, drafted, accepted)
        if lacks_token:
            self.speculator.stop(sequence)
        if outputs:
            self._follow_run(sequence, outputs)
        if not sequence.finished:
            self._pending.settle(sequence, 0 if lacks_token else len(outputs))
        return outputs

    def _follow_run(self, sequence: Sequence, outputs: list[Output]) -> None:
        shares = sequence.computed // PAGE_TOKENS > sequence.prefix.offered
        if shares and not isinstance(outputs[-1], RequestFailed):
            self.policy.page_manager.share(sequence, sequence.computed)
        self._totals.generated_tokens += len(outputs) - 1  # only the last one may be its end
        self._follow(sequence, outputs[-1])

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, except for pages that a sequence holds."""
        self.policy.page_manager.forget_prefixes()

    def reload(self, prefix_identity: bytes | None) -> None:
        """For other weights: empty the prefix cache and bump every page, with the next plan.

        Raises IntegrityError while there is work: drain first.
        """
        if self.has_work:
            raise IntegrityError(f"a reload with {len(self._requests)} requests: drain first")
        self.policy.page_manager.reload(prefix_identity)

    def restart(self, prefix_identity: bytes | None) -> None:
        """For another arithmetic: no page that was computed before is read again."""
        self._pending.refuse_any()
        self.policy.restart(prefix_identity)
        self.speculator.close()  # approximate bits would depend on drafts

    def recompute(
        self, prefix_identity: bytes | None, other_weights: bool, keep_keys: bool = False
    ) -> None:
        """Prefill every running request again, from its ids so far, under this identity.

        No page that was computed before is read again; how a sequence samples, its position, its
        penalties and its schema are as they were. So what follows is a function of the ids so far,
        the weights and the seed. other_weights: those that computed them no longer serve, so what
        earlier outputs taught is forgotten too. keep_keys: requests that have tokens already go on
        with the keys and values that other weights computed, so that nothing is promised of their
        further tokens, which say so. Raises IntegrityError while a step is pending.
        """
        self._pending.refuse_any()
        for sequence in self._requests.unfinished():
            forget_prompt_scores(sequence)
        self.policy.restart(prefix_identity, keep_keys)
        self._marks_old_keys = self._marks_old_keys or keep_keys
        if other_weights:
            self.speculator.forget(self._requests.next_admission)

    def statistics(self) -> SchedulerStatistics:
        """Gauges and totals."""
        live, waiting = len(self._requests), self._requests.waiting_count
        drafts = self.speculator.counts
        return take_statistics(self.policy, live, waiting, self._next_step, self._totals, drafts)

    def check_integrity(self) -> None:
        """Refuse (IntegrityError) a state that breaks an invariant; for idle time and tests."""
        self.policy.check_integrity(self._pending.finished)
        live = [sequence.key for sequence in self._requests.unfinished()]
        queued = [s.key for queue in (self.policy.running, self.policy.waiting) for s in queue]
        if sorted(live) != sorted(queued):
            raise IntegrityError(
                f"{len(live)} sequences are alive, but {len(queued)} wait or run, or others do"
            )

    def _plan(self, rows: PlanRows, stop: bool = False) -> StepPlan:
        step, self._next_step = self._next_step, self._next_step + 1
        pages = self.policy.page_manager
        events, digest = pages.take_events(), pages.table.digest()
        plan = StepPlan(PLAN_VERSION, step, events, rows, digest, stop)
        if pages.states is None:
            return plan
        states, digest = pages.states.take_events(), pages.states.table.digest()
        pages.states.follow(rows)
        return msgspec.structs.replace(plan, states=states, state_digest=digest)

    @property
    def _preemption_is_due(self) -> bool:
        """Whether `preempt_every` names the next step."""
        return self.preempt_every > 0 and self._next_step % self.preempt_every == 0

    def _preempt_on_demand(self) -> None:
        if not self._preemption_is_due:
            return
        # Only sequences that progressed: a prompt of many chunks would never be completed else.
        victims = [sequence for sequence in self.policy.running if sequence.progressed]
        for sequence in reversed(victims):
            self.policy.preempt(sequence)

    def _follow(self, sequence: Sequence, output: Output) -> None:
        """Count an output, and end its sequence if it is the last one."""
        if isinstance(output, TokenOutput):
            self._totals.generated_tokens += output.token_id >= 0
            if output.finish_reason is not None:
                self._retire(sequence)
        elif isinstance(output, RequestFailed):
            self.fail(output.request_id, output.code, output.message)

    def _retire(self, sequence: Sequence) -> None:
        sequence.finished = True
        self.speculator.finish(sequence)
        self.policy.remove(sequence)
        if self._pending.has(sequence):
            self._pending.finished.append(sequence)
        else:
            self.policy.page_manager.release(sequence)
        self._requests.drop_if_finished(sequence.request_id)
