"""The scheduler: continuous batching, first come first served, on rank 0 alone.

A step is `plan = schedule()`, run it on every rank, `commit(plan.step, sampled)`; the next one may
be planned while it runs (`schedule_ahead`), and steps are committed in order. Decoding sequences
go first, then chunks of prompts take what is left of the token budget. A sequence is admitted when
pages for all its known tokens are free, but for those that it shares with the prefix cache, and
holds them; it grows by one page at a time while it decodes. When no page is left, the latest
admitted sequence (highest choice first) gives up its pages and goes back to its place in the
waiting line, which is the head; its tokens are kept and recomputed, or found in the prefix cache,
as a longer prompt.

Nobody starves: the first sequence in the total order is never a victim while another runs, and
nobody passes the head of the waiting line; a request that could not fit alone is refused.
"""

from collections.abc import Callable, Iterable, Mapping

from tpdet.control.plan import PLAN_VERSION, Row, StepPlan
from tpdet.control.sampling_row import RowKey, SampledToken
from tpdet.errors import IntegrityError, NumericalError
from tpdet.grammar.constraint import Constraint
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.request import Request, RequestFailed, TokenOutput
from tpdet.scheduler.in_flight import InFlight, Wanted
from tpdet.scheduler.registry import Registry
from tpdet.scheduler.results import Output, check_results, take_results
from tpdet.scheduler.roster import Roster
from tpdet.scheduler.sequence import Sequence
from tpdet.scheduler.statistics import SchedulerStatistics, Totals, take_statistics


class Scheduler:
    """Decides every step. Its methods are called from one thread.

    `preempt_every=k` (for verification) preempts, at every k-th step, each sequence that has
    drawn a token since it was last admitted; answers must not change by it. `prefix_identity`
    names the weights and the contract under which pages may be shared; None shares none.
    `constrain` makes a constraint of a schema's text, or raises RequestError. `approximate`: plans
    are for stock arithmetic.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_pages: int,
        max_queue: int,
        max_model_len: int,
        preempt_every: int = 0,
        prefix_identity: bytes | None = None,
        constrain: Callable[[str], Constraint] | None = None,
        approximate: bool = False,
    ) -> None:
        self.preempt_every = preempt_every
        self.approximate = approximate
        self.roster = Roster(max_num_seqs, max_num_batched_tokens, num_pages, prefix_identity)
        self._registry = Registry(max_queue, max_model_len, constrain)
        self._in_flight = InFlight()
        self._preempt_all = False
        self._next_step = 0
        self._totals = Totals()

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting, running or in flight."""
        return bool(self._registry) or bool(self._in_flight)

    def add(self, request: Request) -> None:
        """Queue `request` as `n` sequences under the next admission number.

        Raises RequestError for one that can never run, whose schema cannot be used or whose id is
        in use, and OverloadedError when `max_queue` requests wait already.
        """
        sequences = self._registry.add(request, self.roster.ledger.num_pages)
        for sequence in sequences:
            self.roster.waiting.put(sequence)
        self._totals.requests_added += 1
        self._totals.prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request whose reader has gone, or one choice that its reader saw complete.

        May be called at any time; unknown ids are ignored. Pages of a sequence in flight are
        freed at the commit.
        """
        for sequence in self._registry.live(request_id, choice):
            self._retire(sequence)
            if choice is None and request_id not in self._registry:
                self._totals.requests_aborted += 1

    def fail(self, request_id: str, code: str, message: str) -> RequestFailed | None:
        """End a request with an error for its reader; None when it is gone already.

        May be called at any time. After a numerical error its pages are marked NAN.
        """
        sequences = self._registry.live(request_id)
        if not sequences:
            return None
        for sequence in sequences:
            sequence.poisoned = code == NumericalError.code
            self._retire(sequence)
        self._totals.requests_failed += 1
        return RequestFailed(request_id, code, message)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run.

        Raises IntegrityError while a step is in flight.
        """
        self._in_flight.refuse_any()
        self._preempt_on_demand()
        return self._take_off(self.roster.choose())

    def schedule_ahead(self) -> StepPlan | None:
        """The step after the one in flight, whose results are not known; None if it must wait.

        It is without the sequences whose next row depends on results (`awaits_results`), and
        waits when these are many, when pages are short or a preemption is due, and when two steps
        are in flight.
        """
        due = self._preempt_all or (
            self.preempt_every and self._next_step % self.preempt_every == 0
        )
        if len(self._in_flight) != 1 or due or not self.roster.may_run_ahead:
            return None
        return self._take_off(self.roster.choose())

    def _take_off(self, takes: dict[RowKey, int]) -> StepPlan | None:
        chosen = [s for s in self.roster.running if s.key in takes]
        if not chosen:
            return None
        for sequence in chosen:
            self._registry.started(sequence)
        drawn = self._in_flight.drawn
        plan = self._plan(tuple(s.row(takes[s.key], drawn) for s in chosen))
        self._in_flight.begin(plan, chosen)
        self._totals.batches += 1
        self._totals.batched_rows += len(plan.rows)
        return plan

    def heartbeat(self, stop: bool = False) -> StepPlan:
        """A plan without rows, which carries the events so far; it needs no commit.

        Raises IntegrityError while a step is in flight.
        """
        self._in_flight.refuse_any()
        return self._plan((), stop)

    def wanted(self, plan: StepPlan) -> Wanted:
        """What each row of the plan that took off last is to give: to sample, then to score."""
        return self._in_flight.wanted(plan)

    def commit(
        self,
        step: int,
        sampled: Mapping[RowKey, SampledToken],
        prompt_scores: Mapping[RowKey, Iterable[SampledToken]] | None = None,
    ) -> list[Output]:
        """Take the results of the oldest step in flight; what readers should hear, in row order.

        `sampled` has a token for every row that was wanted to draw one (see `wanted`),
        `prompt_scores` the scored targets for every row that was to score some. Raises
        IntegrityError, before anything is changed, when the step or a key does not fit. A request
        whose token would end it before `min_tokens` fails alone.
        """
        flight = self._in_flight.oldest(step)
        scores = {key: tuple(tokens) for key, tokens in (prompt_scores or {}).items()}
        check_results(flight, sampled, scores)
        for sequence in self._in_flight.land():
            self.roster.ledger.release(sequence)
        outputs: list[Output] = []
        for row, sequence in flight.rows:
            self._totals.computed_tokens += len(row.token_ids)
            if not sequence.finished:
                approximate = flight.plan.approximate
                told = take_results(sequence, row, sampled, scores, approximate)
                end = row.start + len(row.token_ids)
                # Sound logits speak for every position before them; a row without any does not.
                offers = row.logits and end // PAGE_TOKENS > sequence.offered
                if offers and not any(isinstance(it, RequestFailed) for it in told):
                    self.roster.ledger.share(sequence, end)
                for output in told:
                    self._follow(sequence, output)
                outputs += told
        return outputs

    def preempt_all(self) -> None:
        """Preempt every running sequence at the next `schedule` (for verification)."""
        self._preempt_all = True

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, but for pages that a sequence holds."""
        self.roster.ledger.forget_prefixes()

    def reload(self, prefix_identity: bytes | None) -> None:
        """Other weights: empty the prefix cache and bump every page, with the next plan.

        Raises IntegrityError while there is work: drain first.
        """
        if self.has_work:
            raise IntegrityError(f"a reload with {len(self._registry)} requests: drain first")
        self.roster.ledger.reload(prefix_identity)

    def become_approximate(self, prefix_identity: bytes | None) -> None:
        """Plan for stock arithmetic from now on; what was computed before is never read again."""
        self._in_flight.refuse_any()
        self.roster.restart(prefix_identity)
        self.approximate = True

    def statistics(self) -> SchedulerStatistics:
        """Gauges and totals."""
        live, waiting = len(self._registry), self._registry.waiting_count
        return take_statistics(self.roster, live, waiting, self._next_step, self._totals)

    def check_integrity(self) -> None:
        """Refuse (IntegrityError) a state that breaks an invariant; for idle time and tests."""
        self.roster.check_integrity(self._in_flight.leaving)
        live = [sequence.key for sequence in self._registry.everyone()]
        lined = [s.key for line in (self.roster.running, self.roster.waiting) for s in line]
        if sorted(live) != sorted(lined):
            raise IntegrityError(
                f"{len(live)} sequences are alive, but {len(lined)} wait or run, or others do"
            )

    def _plan(self, rows: tuple[Row, ...], stop: bool = False) -> StepPlan:
        step, self._next_step = self._next_step, self._next_step + 1
        ledger = self.roster.ledger
        events, digest = ledger.take_events(), ledger.table.digest()
        return StepPlan(
            PLAN_VERSION, step, events, rows, digest, stop, approximate=self.approximate
        )

    def _preempt_on_demand(self) -> None:
        due = self.preempt_every and self._next_step % self.preempt_every == 0
        # Only those that progressed: else a prompt of many chunks would never get done.
        victims = [s for s in self.roster.running if self._preempt_all or (due and s.progressed)]
        self._preempt_all = False
        for sequence in reversed(victims):
            self.roster.preempt(sequence)

    def _follow(self, sequence: Sequence, output: Output) -> None:
        """Draw the consequence of what a reader is told."""
        if isinstance(output, RequestFailed):
            self.fail(output.request_id, output.code, output.message)
        elif isinstance(output, TokenOutput):
            self._totals.generated_tokens += output.token_id >= 0
            if output.finish_reason is not None:
                self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        sequence.finished = True
        self.roster.leave(sequence)
        if self._in_flight.has(sequence):
            self._in_flight.leaving.append(sequence)
        else:
            self.roster.ledger.release(sequence)
        self._registry.forget_if_over(sequence.request.request_id)
