"""A server and its clients on a virtual clock: arrivals, aborts, NaN, full queues, lost ranks.

Time passes as steps take it: a fixed part, and a part for each token. Clients come again after
`Retry-After`, and after the server that lost a rank was started anew.
"""

import heapq
import random
from dataclasses import dataclass, field

from tests.scheduler.simulated.answers import make_prompt
from tests.scheduler.simulated.simulation import Simulation, make_scheduler
from tpdet.cache.versions import version_id
from tpdet.control.plan import StepPlan
from tpdet.errors import OverloadedError
from tpdet.requests.request import Request, RequestFailed, TokenOutput

STEP_SECONDS, TOKEN_SECONDS = 0.004, 0.001
RETRY_AFTER, RESTART_SECONDS = 1.0, 2.0
LIMITS = {"num_pages": 30, "max_num_batched_tokens": 20, "max_num_seqs": 8, "max_queue": 12}

_draw = random.Random(21)
STEMS = [[_draw.randrange(10, 50) for _ in range(40)] for _ in range(2)]
STEMS.append([1, 2, 3, 4, *STEMS[0][4:]])  # equal pages after another one


@dataclass(frozen=True)
class Client:
    """A request, when it comes, and what its client or fate does to it."""

    request: Request
    arrives: float
    leaves_after: float | None = None
    broken_at: int | None = None  # position at which NaN is written


def random_clients(seed: int, count: int, per_second: float) -> list[Client]:
    """`count` clients that come at random; prompts share their beginnings."""
    random_, now, clients = random.Random(seed), 0.0, []
    for number in range(count):
        now += random_.expovariate(per_second)
        ids = random_.choice(STEMS)[: random_.choice((1, 3, 4, 8, 9, 17, 40))]
        if random_.random() < 0.6:
            ids = [*ids, *(random_.randrange(10, 50) for _ in range(random_.randint(1, 9)))]
        request = make_prompt(
            f"r{number}",
            ids,
            tenant=random_.choice(("", "", "t")),
            n=random_.choice((1, 1, 1, 1, 2, 3)),
            seed=random_.randrange(2**63),
            max_tokens=random_.choice((0, 1, 4, 9, 24)),
            ignore_eos=random_.random() < 0.5,
            presence_penalty=0.5 if random_.random() < 0.05 else 0.0,
            prompt_logprobs=0 if random_.random() < 0.05 else None,
        )
        leaves = random_.random() * 0.4 if random_.random() < 0.05 else None
        broken = random_.randrange(len(ids) + 5) if random_.random() < 0.02 else None
        clients.append(Client(request, now, leaves, broken))
    return clients


@dataclass
class Gaps:
    """The longest pause between two tokens of a choice that kept its pages meanwhile.

    `longest_absent`: of one that a step ahead leaves out, because it depends on results.
    """

    longest: float = 0.0
    longest_absent: float = 0.0
    longest_preempted: float = 0.0
    last: dict[tuple[str, int], float] = field(default_factory=dict)
    preempted: set[tuple[str, int]] = field(default_factory=set)

    def token(self, key: tuple[str, int], now: float, reads_results: bool) -> None:
        """A choice's token arrived."""
        gap = now - self.last.get(key, now)
        if key in self.preempted:
            self.longest_preempted = max(self.longest_preempted, gap)
        elif reads_results:
            self.longest_absent = max(self.longest_absent, gap)
        else:
            self.longest = max(self.longest, gap)
        self.preempted.discard(key)
        self.last[key] = now


class TimedSimulation(Simulation):
    """Tells a `World` of each token and each preemption."""

    def __init__(self, world: "World") -> None:
        super().__init__(make_scheduler(prefix_identity=b"m", **world.limits))
        self.asked: dict[str, int] = {}  # choices that have not ended
        self._ended: list[str] = []
        self._world, preempt = world, self.scheduler.policy.preempt

        def noted(sequence) -> None:
            world.gaps.preempted.add((sequence.request.request_id, sequence.choice))
            world.preemptions += 1
            preempt(sequence)

        self.scheduler.policy.preempt = noted

    def add(self, request: Request) -> None:
        """Queue a request."""
        super().add(request)
        self.asked[request.request_id] = request.params.n

    def hear(self, output) -> None:
        """Note when a token came, and who has ended."""
        super().hear(output)
        name = output.request_id
        if isinstance(output, TokenOutput):
            params = self._world.clients[name].request.params
            reads_results = params.reads_tokens or params.prompt_logprobs is not None
            self._world.gaps.token((name, output.choice), self._world.now, reads_results)
            self.asked[name] -= output.finish_reason is not None
        if isinstance(output, RequestFailed) or self.asked[name] == 0:
            self._ended.append(name)

    def take_ended(self) -> list[str]:
        """Requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


class World:
    """Clients and one server at a time."""

    def __init__(self, clients: list[Client], losses: list[float], ahead: bool, **limits) -> None:
        self.limits, self.ahead = LIMITS | limits, ahead
        self.clients = {client.request.request_id: client for client in clients}
        self.now, self.gaps, self.restarts = 0.0, Gaps(), 0
        self.refusals = self.preemptions = self.hit_tokens = self.lost_answers = 0
        self.down_until = 0.0
        self.done: dict[str, str] = {}  # how each request ended
        self.sim = TimedSimulation(self)
        self.sims = [self.sim]
        self._events: list[tuple[float, int, str, str]] = []
        self._planned = 0
        for client in clients:
            self._at(client.arrives, "ask", client.request.request_id)
        for moment in losses:
            self._at(moment, "lose", "")

    def run(self) -> None:
        """Until every client has gone home. AssertionError on livelock."""
        steps = 0
        while self._events or self.sim.scheduler.has_work:
            self._happen()
            if not self.sim.scheduler.has_work:
                self.now = max(self.now, self._events[0][0]) if self._events else self.now
                continue
            self._step()
            steps += 1
            assert steps < 400 * len(self.clients) + 1000, "livelock"
            if steps % 500 == 0:
                self.sim.scheduler.check_integrity()
        self._count()

    def check(self) -> None:
        """Every request ended as its fate was, with the answer it gets alone, and all is free."""
        assert self.done.keys() == self.clients.keys()
        for name, client in self.clients.items():
            if self.done[name] == "finished":
                self._sim_of(name).check_answer(client.request)
            elif self.done[name] == "failed":
                assert client.broken_at is not None
            else:
                assert self.done[name] == "left" and client.leaves_after is not None
        self.sim.check_idle()
        self.sim.scheduler.forget_prefixes()
        self.sim.check_idle()
        pages = self.sim.scheduler.policy.page_manager
        assert pages.allocator.free_count == pages.num_pages == self.limits["num_pages"]

    def _at(self, moment: float, kind: str, name: str) -> None:
        self._planned += 1
        heapq.heappush(self._events, (moment, self._planned, kind, name))

    def _happen(self) -> None:
        while self._events and self._events[0][0] <= self.now:
            _, _, kind, name = heapq.heappop(self._events)
            if kind == "lose":
                self.lose_a_rank()
            elif name not in self.done:
                self._ask(name) if kind == "ask" else self._leave(name)

    def _ask(self, name: str) -> None:
        client = self.clients[name]
        if self.now < self.down_until:
            self._at(self.now + RETRY_AFTER, "ask", name)
            return
        try:
            self.sim.add(client.request)
        except OverloadedError:
            self.refusals += 1
            self._at(self.now + RETRY_AFTER, "ask", name)
            return
        if client.broken_at is not None:
            owner = version_id(name, client.request.params.seed, 0)
            self.sim.broken |= {(owner, client.broken_at)}
        if client.leaves_after is not None:
            self._at(self.now + client.leaves_after, "leave", name)

    def _leave(self, name: str) -> None:
        self._collect()
        if name not in self.done:
            self.sim.scheduler.abort(name)
            self.done[name] = "left"

    def lose_a_rank(self) -> None:
        """Every open answer ends with an error; a server with empty tables takes its place."""
        self._collect()
        open_ = [name for name in self.sim.asked if name not in self.done]
        self._count()
        self.lost_answers += len(open_)
        self.restarts += 1
        self.down_until = self.now + RESTART_SECONDS
        self.sim = TimedSimulation(self)
        self.sims.append(self.sim)
        for name in open_:
            for choice in range(self.clients[name].request.params.n):
                self.gaps.last.pop((name, choice), None)
                self.gaps.preempted.discard((name, choice))
            self._at(self.now + RETRY_AFTER, "ask", name)

    def _step(self) -> None:
        """As the engine steps. What happens meanwhile happens while a step is in flight."""
        sim = self.sim
        if not sim.pending:
            sim.begin()
        if self.ahead and sim.pending:
            sim.begin(ahead=True)
        if sim.pending:
            self.now += seconds(sim.pending[0])
            self._happen()
            if self.sim is sim:
                sim.end(sim.pending[0])
        self._collect()

    def _collect(self) -> None:
        """Note who has finished or failed."""
        for name in self.sim.take_ended():
            if name not in self.done:
                failed = name in self.sim.failures
                self.done[name] = "failed" if failed else "finished"

    def _count(self) -> None:
        self._collect()
        self.hit_tokens += self.sim.scheduler.statistics().totals.prefix_hit_tokens

    def _sim_of(self, name: str) -> TimedSimulation:
        """The server that ended a request: the last one that was asked."""
        return next(sim for sim in reversed(self.sims) if name in sim.asked)


def seconds(plan: StepPlan) -> float:
    """How long a step takes."""
    return STEP_SECONDS + TOKEN_SECONDS * sum(len(row.token_ids) for row in plan.rows)


def longest_step(budget: int) -> float:
    """How long a step may take: what bounds the pause between two tokens."""
    return STEP_SECONDS + TOKEN_SECONDS * budget
