"""A hypothesis state machine: scheduler, page table and version table against a simple model.

`python -m tests.scheduler_machine EXAMPLES SEED` runs it alone, so that PYTHONHASHSEED can be set,
and prints a digest of the plans of a fixed load. Pages have 4 positions here.
"""

import random
import sys

import blake3
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.scheduler_model import ModelOfPages
from tests.scheduler_simulation import Simulation, answer_alone, make_prompt, make_scheduler
from tests.small_pages import small_pages
from tpdet.cache.versions import version_id
from tpdet.errors import OverloadedError, RequestError
from tpdet.plan import encode_plan

SIZE = 4
STEPS = 24
SCHEDULERS = [
    {"num_pages": pages, "max_num_batched_tokens": budget, "max_num_seqs": seats,
     "max_queue": queue, "preempt_every": every, "prefix_identity": identity,
     "others_per_absent": others}
    for pages, budget, seats, queue, every, identity, others in (
        (6, 5, 3, 2, 0, b"m", 1), (9, 16, 4, 3, 0, b"m", 2), (30, 40, 8, 9, 0, b"m", 1),
        (8, 3, 8, 3, 3, b"m", 0), (6, 9, 4, 4, 0, None, 1), (12, 64, 2, 4, 2, b"m", 10),
    )
]  # fmt: skip
_stem = random.Random(4)
_long = tuple(_stem.randrange(10, 50) for _ in range(20))
STEMS = [_long, (1, 2, 3, 4, *_long[4:])]  # equal pages after another one
# Drawn as one number each: a draw is what a machine's time goes into.
BODIES = [
    (STEMS[stem][:length], tenant, params)
    for stem, length in ((0, 1), (0, 4), (0, 9), (0, 12), (0, 17), (1, 8), (1, 13), (0, 20))
    for tenant in ("", "", "t")
    for params in (
        {"max_tokens": 1}, {"max_tokens": 7, "ignore_eos": True}, {"max_tokens": 0},
        {"max_tokens": 5, "n": 2}, {"max_tokens": 3, "presence_penalty": 0.5},
        {"max_tokens": 2, "prompt_logprobs": 0}, {"max_tokens": 9, "n": 3, "ignore_eos": True},
    )
]  # fmt: skip


class SchedulerMachine(RuleBasedStateMachine):
    """Everything that may be done to a scheduler, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: set[str] = set()  # aborted or failed: cut short
        self.broken_choices: set[tuple[str, int]] = set()
        self.asked: dict[str, object] = {}
        self.started: set[str] = set()

    @initialize(which=st.sampled_from(SCHEDULERS))
    def open(self, which) -> None:
        self.limits = which
        self.scheduler = make_scheduler(**which)
        self.sim = Simulation(self.scheduler)
        self.model = ModelOfPages(which["num_pages"], SIZE)

    @rule(body=st.sampled_from(BODIES), count=st.sampled_from((1, 1, 2)))
    def add(self, body, count) -> None:
        ids, tenant, params = body
        for _ in range(count):
            request = make_prompt(f"r{len(self.asked)}", ids, tenant, **params)
            waiting = self.live - self.started
            needed = -(-(len(ids) + max(params["max_tokens"] - 1, 0)) // SIZE)
            try:
                self.sim.add(request)
            except OverloadedError:
                assert len(waiting) == self.limits["max_queue"]
            except RequestError:
                assert needed > self.limits["num_pages"]
            else:
                assert len(waiting) < self.limits["max_queue"]
                assert needed <= self.limits["num_pages"]
                self.asked[request.request_id] = request

    @rule(steps=st.integers(1, 6))
    def step(self, steps) -> None:
        for _ in range(steps):
            if not self.sim.flying:
                self.fly(self.sim.begin())
            if self.sim.flying:
                self.land()

    @rule(steps=st.integers(1, 4))
    def step_ahead(self, steps) -> None:
        for _ in range(steps):
            if not self.sim.flying:
                self.fly(self.sim.begin())
            if len(self.sim.flying) == 1:
                self.fly(self.sim.begin(ahead=True))
            if self.sim.flying:
                self.land()

    @precondition(lambda self: len(self.sim.flying) < 2)
    @rule()
    def take_off(self) -> None:
        self.fly(self.sim.begin(ahead=bool(self.sim.flying)))

    @precondition(lambda self: self.asked)
    @rule(age=st.integers(0, 5), how=st.sampled_from(("abort", "choice", "nan", "fail")))
    def end(self, age, how) -> None:
        name = f"r{len(self.asked) - 1 - age}"  # now and then nobody's
        if how == "abort":
            self.scheduler.abort(name)
        elif how == "choice":
            self.scheduler.abort(name, 0)
        else:
            code = "numerical_error" if how == "nan" else "internal_error"
            failed = self.scheduler.fail(name, code, how)
            assert (failed is not None) == (name in self.live)
        if name in self.asked:  # else nobody's: nothing happened
            (self.broken_choices if how == "choice" else self.ended).add(
                (name, 0) if how == "choice" else name
            )

    @rule(what=st.sampled_from(("preempt", "forget", "heartbeat", "reload")))
    def disturb(self, what) -> None:
        if what == "preempt":
            self.scheduler.preempt_all()
        elif what == "forget":
            self.scheduler.forget_prefixes()
        elif not self.sim.flying:
            if what == "reload" and not self.scheduler.has_work:
                self.scheduler.reload(self.limits["prefix_identity"])
            self.beat()

    @invariant()
    def the_counts_are_the_models(self) -> None:
        self.scheduler.check_integrity()
        found = self.scheduler.statistics()
        waiting = self.live - self.started
        assert found.requests_waiting == len(waiting) <= self.limits["max_queue"]
        assert found.requests_running == len(self.live) - len(waiting)
        assert found.sequences_running <= self.limits["max_num_seqs"]
        assert found.pages_used + found.pages_free == self.limits["num_pages"]
        assert found.totals.requests_added == len(self.asked)

    def teardown(self) -> None:
        """Run to the end: everybody who was not cut short has the answer it gets alone."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if self.sim.flying:
                self.land()
                continue
            plan = self.sim.begin()
            if plan is None:
                break
            self.fly(plan)
        assert not self.scheduler.has_work, "livelock"
        for name, request in self.asked.items():
            for choice in range(request.params.n):
                alone, cut = answer_alone(request, choice), (name, choice) in self.broken_choices
                answer = self.sim.answers.get((name, choice))
                if name in self.ended or cut:
                    told = answer.tokens if answer else []
                    assert told == alone.tokens[: len(told)]
                else:
                    assert answer == alone
        self.scheduler.forget_prefixes()
        self.beat()
        assert self.model.used == 0
        self.sim.check_idle()
        assert self.scheduler.roster.ledger.pages.free_count == self.limits["num_pages"]

    @property
    def live(self) -> set[str]:
        """Requests of which a choice has not ended, as their readers would count."""
        found = set()
        for name, request in self.asked.items():
            for choice in range(request.params.n):
                answer = self.sim.answers.get((name, choice))
                over = answer is not None and answer.finish is not None
                if not over and (name, choice) not in self.broken_choices:
                    found.add(name)
        return found - self.ended

    def fly(self, plan) -> None:
        if plan is None:
            return
        drawn, budget = self.drawn_before, self.limits["max_num_batched_tokens"]
        keys = [(row.admission, row.choice) for row in plan.rows]
        assert keys == sorted(set(keys))
        assert 0 < sum(len(row.token_ids) for row in plan.rows) <= budget
        self.model.follow(plan, self.sim.salts, drawn)
        self.check_tables()
        owners = {row.version_id for row in plan.rows}
        for name in self.live - self.started:
            params = self.asked[name].params
            if any(version_id(name, params.seed, i) in owners for i in range(params.n)):
                self.started.add(name)

    def land(self) -> None:
        self.sim.end(self.sim.flying[0])

    def beat(self) -> None:
        plan = self.scheduler.heartbeat()
        self.sim.send(plan)
        self.model.follow(plan, self.sim.salts, [])
        self.check_tables()

    def check_tables(self) -> None:
        table = self.sim.ranks[1].table
        for number, page in enumerate(self.model.pages):
            assert (table.version(number), table.owner(number)) == (page.version, page.owner)

    @property
    def drawn_before(self) -> list[int]:
        """Tokens of the step before the latest plan, which its negative ids name."""
        return self.sim.drawn_before


def run_machine(examples: int, seed_: int, shrink: bool = True) -> None:
    """Run `examples` of the machine, drawn from `seed_`; what fails is made small or not."""
    machine = seed(seed_)(type("Machine", (SchedulerMachine,), {}))
    with small_pages(SIZE):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                print_blob=False,
                phases=(Phase.generate, Phase.shrink)[: 1 + shrink],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )


def digest_of_plans() -> str:
    """Hex of the plans of a fixed load: the same in every process, whatever its hash seed."""
    random_, digest = random.Random(9), blake3.blake3()
    with small_pages(SIZE):
        for limits in SCHEDULERS:
            sim = Simulation(make_scheduler(**limits))
            for number in range(60):
                ids, tenant, params = random_.choice(BODIES)
                try:
                    sim.add(make_prompt(f"r{number}", ids, tenant, **params))
                except (OverloadedError, RequestError):
                    sim.run(ahead=number % 2 > 0)
                if random_.random() < 0.1:
                    sim.scheduler.abort(f"r{random_.randrange(number + 1)}")
            sim.run()
            for plan in sim.plans:
                digest.update(encode_plan(plan))
    return digest.hexdigest()


if __name__ == "__main__":
    run_machine(int(sys.argv[1]), int(sys.argv[2]))
    print(digest_of_plans())
