"""A scheduler on ranks without torch, whose model is a hash of what it reads.

The next token depends on every token id read back through the row's page table, on the seed, the
choice and the position; so a wrong page, a stale page or a lost token changes the answer.
"""

import numpy as np

from tests.scheduler.simulated.answers import Answer, answer_alone, draw, score, scores_alone
from tests.scheduler.simulated.rank import NAN, FakeRank
from tests.scheduler.simulated.states import FakeStates
from tpdet.cache.state_table import StateRoom
from tpdet.cache.versions import SHARED, version_id
from tpdet.control.plan import SHARE, PlanRows, StepPlan, decode_plan, encode_plan, settle_rows
from tpdet.requests.request import PromptOutput, Request, RequestFailed, TokenOutput
from tpdet.scheduler import Scheduler


class Simulation:
    """A scheduler, rank 0, a second rank that gets plans as bytes, and the readers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        pages = scheduler.policy.page_manager.num_pages
        self.ranks = [FakeRank(pages, fake_states(scheduler)) for _ in range(2)]
        self.answers: dict[tuple[str, int], Answer] = {}
        self.prompt_outputs: dict[str, PromptOutput] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.plans: list[StepPlan] = []
        self.pending: list[StepPlan] = []
        self._preempt_all = False
        self.results: dict[int, tuple[dict, dict, bool, dict]] = {}
        self.rows: dict[int, PlanRows] = {}
        self.spoiled: dict[int, set[tuple[int, int]]] = {}
        self.drawn: list[int] = []
        self.drawn_before: list[int] = []
        self.broken: frozenset[tuple[int, int]] = frozenset()
        self.salts: dict[int, tuple[str, str]] = {}
        self.page_salts: dict[int, tuple[str, str]] = {}

    def add(self, request: Request) -> None:
        """Queue a request; its salts are watched."""
        self.scheduler.add(request)
        params = request.params
        for choice in range(params.n):
            owner = version_id(request.request_id, params.seed, choice)
            self.salts[owner] = request.tenant_salt, request.cache_salt

    def preempt_all(self) -> None:
        """Preempt every running sequence before the next step that is not planned ahead."""
        self._preempt_all = True

    def begin(self, ahead: bool = False) -> StepPlan | None:
        """Schedule, send the plan to both ranks, which run it."""
        if self._preempt_all:
            if ahead:
                return None
            assert not self.pending, "a pending step still writes pages"
            self._preempt_all = False
            for sequence in reversed(list(self.scheduler.policy.running)):
                self.scheduler.policy.preempt(sequence)
        plan = self.scheduler.schedule_ahead() if ahead else self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.pending.append(plan)
            self.send(plan)
            rows = plan.rows
            if rows.expected:
                rows, _ = settle_rows(rows, np.array(self.drawn))
            self.rows[plan.step] = rows
            self.results[plan.step] = self.sample(plan, rows)
        return plan

    def send(self, plan: StepPlan) -> None:
        self.ranks[0].receive(plan, self.drawn, self.broken)
        self.ranks[1].receive(decode_plan(encode_plan(plan)), self.drawn, self.broken)
        self.check_salts(plan)
        assert self.ranks[0].table.full_digest() == self.ranks[1].table.full_digest()
        first, second = (rank.states for rank in self.ranks)
        if first is not None and second is not None:
            assert first.table.full_digest() == second.table.full_digest()

    def check_salts(self, plan: StepPlan) -> None:
        """Nobody reads a page that was shared under other salts."""
        for event in plan.events:
            if event.kind == SHARE:
                self.page_salts[event.page] = self.salts.get(event.version_id, ("", ""))
        for row in plan.rows:
            mine = self.salts.get(row.version_id, ("", ""))
            for page in row.pages:
                if self.ranks[0].table.owner(page) == SHARED:
                    assert self.page_salts[page] == mine, "a page of another tenant"

    def sample(self, plan: StepPlan, rows: PlanRows) -> tuple[dict, dict, bool, dict]:
        """What `Scheduler.commit` takes; a sequence that reads NAN gets no token and no scores.

        rows: the plan's, where they begin.
        """
        sampled, scores, runs, drawn = {}, {}, {}, []
        wanted_rows = self.scheduler.latest(plan).wanted()
        self.spoiled[plan.step] = set()
        unverified = plan.rows.unverified.tolist()
        for row, before, sampling, scoring in zip(rows, unverified, *wanted_rows, strict=True):
            wanted = 0
            end = row.start + len(row.token_ids)
            if row.logits and NAN in self.ranks[0].read(row, end):
                drawn += [0] * row.samples
                self.spoiled[plan.step].add((row.admission, row.choice))
                continue
            if scoring is not None:
                wanted = end - scoring.start
                scores[scoring.key] = [
                    score(self.ranks[0].read(row, scoring.start + j + 1), target)
                    for j, target in enumerate(scoring.target_ids)
                ]
            assert bool(row.samples) is (sampling is not None)
            if row.samples > 1:
                ids = self.ranks[1].read(row, end)
                runs[row.admission, row.choice] = run = [
                    draw(ids[: row.start + 1 + j], sampling.seed, sampling.choice)
                    for j in range(row.samples)
                ]
                drawn += [token.token_id for token in run]
            elif sampling is not None:
                wanted = max(wanted, 1)
                ids = self.ranks[1].read(row, end)
                assert before or sampling.position == end
                prompt, output = list(sampling.prompt_ids), list(sampling.output_ids)
                assert prompt == list(ids[: len(prompt)])
                assert not output or output == list(ids[-len(output) :])
                token = draw(ids, sampling.seed, sampling.choice, sampling.forbidden)
                sampled[row.admission, row.choice] = token
                drawn.append(token.token_id)
            assert row.logits >= wanted
        self.drawn, self.drawn_before = drawn, self.drawn
        return sampled, scores, False, runs

    def end(self, plan: StepPlan) -> None:
        """Commit."""
        self.pending.remove(plan)
        step, spoiled = self.scheduler._pending.oldest(plan.step), self.spoiled.pop(plan.step)
        for row, sequence in zip(self.rows.pop(plan.step), step.sequences, strict=True):
            if row.logits and not (sequence.expected or sequence.key in step.void):
                self.ranks[0].read(row, row.start + len(row.token_ids))
            if sequence.key in spoiled - step.void:
                assert any(owner == row.version_id for owner, _ in self.broken), "another's NaN"
                name = sequence.request.request_id
                failure = self.scheduler.fail(name, "numerical_error", "NaN in the logits")
                if failure is not None:
                    self.hear(failure)
        for output in self.scheduler.commit(plan.step, *self.results.pop(plan.step)):
            self.hear(output)

    def hear(self, output) -> None:
        if isinstance(output, PromptOutput):
            assert output.request_id not in self.prompt_outputs, "prompt scores told twice"
            assert (output.request_id, 0) not in self.answers, "prompt scores come first"
            self.prompt_outputs[output.request_id] = output
        elif isinstance(output, RequestFailed):
            self.failures[output.request_id] = output
        else:
            assert isinstance(output, TokenOutput)
            answer = self.answers.setdefault((output.request_id, output.choice), Answer())
            assert answer.finish is None, "a token after the end"
            answer.tokens.append(output.token_id)
            answer.logprobs.append(output.logprob)
            answer.finish = output.finish_reason
            assert (output.stop_token_id == output.token_id) is (output.finish_reason == "stop")

    def step(self) -> bool:
        plan = self.begin()
        if plan is not None:
            self.end(plan)
        return plan is not None

    def run_one(self, ahead: bool) -> bool:
        """As an engine steps: with `ahead`, one step more is in flight when one ends."""
        if not ahead:
            return self.step()
        if not self.pending:
            self.begin()
        if self.pending:
            self.begin(ahead=True)
            self.end(self.pending[0])
            return True
        return False

    def run(self, limit: int = 100_000, ahead: bool = False) -> int:
        """Step until nothing is left; the number of steps."""
        steps = 0
        while self.run_one(ahead):
            steps += 1
            assert steps < limit, "livelock"
        assert not self.scheduler.has_work
        return steps

    def check_idle(self) -> None:
        """Nothing is held, and all tables agree down to their bytes."""
        self.scheduler.check_integrity()
        self.send(self.scheduler.heartbeat())
        pages = self.scheduler.policy.page_manager
        assert pages.free_count == pages.num_pages
        assert pages.table.full_digest() == self.ranks[1].table.full_digest()
        states = self.ranks[1].states
        if pages.states is not None and states is not None:
            assert pages.states.table.full_digest() == states.table.full_digest()
            assert not pages.states.counts.state_slots_used

    def check_answer(self, request: Request) -> None:
        """Every choice of `request` got what it gets alone."""
        for choice in range(request.params.n):
            assert self.answers[request.request_id, choice] == answer_alone(request, choice)
        if request.params.prompt_logprobs is not None:
            told = self.prompt_outputs[request.request_id]
            assert told.logprobs == scores_alone(request)
            assert len(told.top) == len(request.prompt_token_ids)


def fake_states(scheduler: Scheduler) -> FakeStates | None:
    """Slots as many as the scheduler has; None where its model has no states."""
    states = scheduler.policy.page_manager.states
    if states is None:
        return None
    counts = states.counts
    return FakeStates(counts.state_slots, counts.snapshots)


def make_scheduler(
    others_per_absent: int = 1, num_snapshots: int | None = None, **settings
) -> Scheduler:
    """A small scheduler; every limit may be overridden.

    num_snapshots: of states, with a slot for every sequence; None: the model has no states.

    Its batches are too small for ten others beside each sequence that a step ahead leaves out.
    """
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_pages": 16,
        "max_queue": 100,
        "max_model_len": 4096,
    }
    limits = {**defaults, **settings}
    if num_snapshots is not None:
        limits["state_room"] = StateRoom(limits["max_num_seqs"], num_snapshots)
    scheduler = Scheduler(**limits)
    scheduler.policy.others_per_absent = others_per_absent
    return scheduler
