"""A state machine drawn by hypothesis: scheduler, page and version table against a simple model.

`python -m tests.scheduler.scheduler_machine EXAMPLES SEED` runs it alone, so that PYTHONHASHSEED
can be set, and prints a digest of the plans of a fixed load. Pages have 4 positions here.

An example is a program, two bytes an act, that hypothesis draws whole and makes smaller where it
fails: its own RuleBasedStateMachine, which draws rule after rule and each rule's arguments, took
two thirds of the time. What the acts were is noted for the reader of a failure.
"""

import random
import sys

import blake3
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

from tests.scheduler.page_tables import ModelOfPages
from tests.scheduler.simulated.answers import answer_alone, make_prompt
from tests.scheduler.simulated.simulation import Simulation, make_scheduler
from tests.scheduler.simulated.small_pages import small_pages
from tpdet.cache.versions import version_id
from tpdet.control.plan import encode_plan
from tpdet.errors import OverloadedError, RequestError

SIZE = 4
SCHEDULERS = [
    {
        "num_pages": pages,
        "max_num_batched_tokens": budget,
        "max_num_seqs": seats,
        "max_queue": queue,
        "preempt_every": every,
        "prefix_identity": identity,
        "others_per_absent": others,
    }
    for pages, budget, seats, queue, every, identity, others in (
        (6, 5, 3, 2, 0, b"m", 1),
        (9, 16, 4, 3, 0, b"m", 2),
        (30, 40, 8, 9, 0, b"m", 1),
        (8, 3, 8, 3, 3, b"m", 0),
        (6, 9, 4, 4, 0, None, 1),
        (12, 64, 2, 4, 2, b"m", 10),
    )
]
_stem = random.Random(4)
_long = tuple(_stem.randrange(10, 50) for _ in range(20))
STEMS = [_long, (1, 2, 3, 4, *_long[4:])]  # equal pages after another one
BODIES = [
    (STEMS[stem][:length], tenant, params)
    for stem, length in ((0, 1), (0, 4), (0, 9), (0, 12), (0, 17), (1, 8), (1, 13), (0, 20))
    for tenant in ("", "", "t")
    for params in (
        {"max_tokens": 1},
        {"max_tokens": 7, "ignore_eos": True},
        {"max_tokens": 0},
        {"max_tokens": 5, "n": 2},
        {"max_tokens": 3, "presence_penalty": 0.5},
        {"max_tokens": 2, "prompt_logprobs": 0},
        {"max_tokens": 9, "n": 3, "ignore_eos": True},
    )
]
ENDS = ("abort", "choice", "nan", "fail")
DISTURBANCES = ("preempt", "forget", "heartbeat", "reload")
ACTS = ("step", "add", "step_ahead", "add_two", "begin", "end", "add", "disturb")
PROGRAMS = st.tuples(
    st.sampled_from(SCHEDULERS),
    st.integers(0, 2 ** len(ACTS) - 1),
    st.binary(min_size=12, max_size=36),  # 12 acts on average
)


class SchedulerMachine:
    """Everything that may be done to a scheduler, in any order.

    `without` has a bit for each act that is left out, so as to make much of the rest.
    """

    def __init__(self, which: dict, without: int) -> None:
        self.ended: set[str] = set()  # aborted or failed: cut short
        self.broken_choices: set[tuple[str, int]] = set()
        self.asked: dict[str, object] = {}
        self.started: set[str] = set()
        self.limits = which
        self.scheduler = make_scheduler(**which)
        self.sim = Simulation(self.scheduler)
        self.model = ModelOfPages(which["num_pages"], SIZE)
        self.acts = [act for bit, act in enumerate(ACTS) if not without >> bit & 1] or ACTS

    def act(self, program: bytes) -> None:
        """Each two bytes: which act, and its argument."""
        for kind, argument in zip(program[::2], program[1::2], strict=False):
            name = self.acts[kind % len(self.acts)]
            note(f"  {name}({argument})")
            getattr(self, name)(argument)
            self.check_counts()

    def add(self, argument) -> None:
        ids, tenant, params = BODIES[argument % len(BODIES)]
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

    def add_two(self, argument) -> None:
        self.add(argument)
        self.add(argument)

    def step(self, argument) -> None:
        for _ in range(1 + argument % 6):
            if not self.sim.pending:
                self.follow(self.sim.begin())
            if self.sim.pending:
                self.commit()

    def step_ahead(self, argument) -> None:
        for _ in range(1 + argument % 4):
            if not self.sim.pending:
                self.follow(self.sim.begin())
            if len(self.sim.pending) == 1:
                self.follow(self.sim.begin(ahead=True))
            if self.sim.pending:
                self.commit()

    def begin(self, _) -> None:
        if len(self.sim.pending) < 2:
            self.follow(self.sim.begin(ahead=bool(self.sim.pending)))

    def end(self, argument) -> None:
        age, how = argument // len(ENDS) % 6, ENDS[argument % len(ENDS)]
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

    def disturb(self, argument) -> None:
        what = DISTURBANCES[argument % len(DISTURBANCES)]
        if what == "preempt":
            self.sim.preempt_all()
        elif what == "forget":
            self.scheduler.forget_prefixes()
        elif not self.sim.pending:
            if what == "reload" and not self.scheduler.has_work:
                self.scheduler.reload(self.limits["prefix_identity"])
            self.beat()

    def check_counts(self) -> None:
        self.scheduler.check_integrity()
        found = self.scheduler.statistics()
        live = self.live
        waiting = live - self.started
        assert found.requests_waiting == len(waiting) <= self.limits["max_queue"]
        assert found.requests_running == len(live) - len(waiting)
        assert found.sequences_running <= self.limits["max_num_seqs"]
        assert found.pages_used + found.pages_free == self.limits["num_pages"]
        assert found.totals.requests_added == len(self.asked)

    def finish(self) -> None:
        """Run to the end: everybody who was not cut short has the answer it gets alone."""
        for _ in range(2000):
            if self.sim.pending:
                self.commit()
                continue
            plan = self.sim.begin()
            if plan is None:
                break
            self.follow(plan)
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
        assert self.scheduler.policy.page_manager.allocator.free_count == self.limits["num_pages"]

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

    def follow(self, plan) -> None:
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

    def commit(self) -> None:
        self.sim.end(self.sim.pending[0])

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


class SeedAlone(HypothesisProvider):
    """Draws by the seed alone.

    Hypothesis' own draws are now and then constants of the modules that are imported, so other
    tests in the process would change what is drawn, and how often it does what it is for.
    """

    def _maybe_draw_constant(self, *_args, **_named) -> None:
        return None


AVAILABLE_PROVIDERS["seed_alone"] = f"{SeedAlone.__module__}.SeedAlone"


def machine_settings(examples: int, shrink: bool) -> settings:
    """Hypothesis' settings of a machine's run; what fails is made small or not."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        backend="seed_alone",
        print_blob=False,
        phases=(Phase.generate, Phase.shrink)[: 1 + shrink],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def run_machine(examples: int, seed_: int, shrink: bool = True) -> None:
    """Run `examples` of the machine, drawn from `seed_`; what fails is made small or not."""

    @seed(seed_)
    @machine_settings(examples, shrink)
    @given(PROGRAMS)
    def run(drawn) -> None:
        which, without, program = drawn
        machine = SchedulerMachine(which, without)
        machine.act(program)
        machine.finish()

    with small_pages(SIZE):
        run()


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
