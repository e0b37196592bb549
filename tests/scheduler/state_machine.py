"""A machine drawn by hypothesis for linear-attention states: requests, drafts, updates, accidents.

As `scheduler_machine.py`, with a slot for each sequence and few snapshots, on ranks whose states
are the ids that they have seen. Pages have 16 positions here, and chunks 8.
"""

from collections import Counter, abc
from functools import partial

import blake3
from hypothesis import given, note, seed
from hypothesis import strategies as st

from tests.scheduler.scheduler_machine import machine_settings
from tests.scheduler.simulated.answers import answer_alone, draw, make_prompt
from tests.scheduler.simulated.simulation import Simulation, make_scheduler
from tests.scheduler.simulated.small_pages import small_pages
from tpdet.control.row_messages import RowKey
from tpdet.errors import OverloadedError, RequestError
from tpdet.requests.request import Request
from tpdet.scheduler.queue import SequenceQueue
from tpdet.scheduler.sequence import PENDING, Sequence, unknown_tokens
from tpdet.scheduler.speculator import Speculator
from tpdet.speculative.draft_rows import decodes, fill_rows, step_room

SIZE = 16
SCHEDULERS = [
    {
        "num_pages": pages,
        "max_num_batched_tokens": budget,
        "max_num_seqs": seats,
        "num_snapshots": snapshots,
        "preempt_every": every,
        "prefix_identity": identity,
    }
    for pages, budget, seats, snapshots, every, identity in (
        (9, 40, 3, 2, 0, b"m0"),
        (30, 100, 6, 9, 0, b"m0"),
        (12, 7, 4, 1, 5, b"m0"),
        (40, 64, 8, 40, 3, b"m0"),
        (9, 33, 3, 0, 2, b"m0"),
        (9, 24, 4, 3, 4, None),
    )
]
_stem = tuple(10 + (7 * i * i + i) % 40 for i in range(96))
BODIES = [
    ((*_stem[:length], *(_other % 40 + 10 for _other in range(length, length + tail))), params)
    for length, tail in ((3, 0), (16, 0), (33, 0), (48, 1), (48, 9), (20, 31), (90, 0), (64, 24))
    for params in (
        {"max_tokens": 1},
        {"max_tokens": 40, "ignore_eos": True},
        {"max_tokens": 20},
        {"max_tokens": 24, "n": 3, "ignore_eos": True},
        {"max_tokens": 3, "presence_penalty": 0.5},
        {"max_tokens": 2, "prompt_logprobs": 0},
    )
]
ACTS = ("step", "step_ahead", "add", "add", "end", "preempt", "update", "forget")
PROGRAMS = st.tuples(st.sampled_from(SCHEDULERS), st.binary(min_size=16, max_size=60))


class RandomDrafts(Speculator):
    """Drafts for two of three requests, as many as fit or fewer, right up to some position.

    follows: rows may follow those that a step still verifies; then they are right but for some.
    """

    def __init__(self, follows: bool = False) -> None:
        super().__init__()
        self._follows, self._drafted = follows, set[RowKey]()

    def admit(self, request: Request, sequences: abc.Sequence[Sequence]) -> None:
        for sequence in sequences:
            if sequence.key[0] % 3 > 0 and sequence.generates:
                sequence.wait_for_drafts(not self._follows)
                self._drafted.add(sequence.key)

    def propose(self, running: SequenceQueue, counts: dict[RowKey, int], budget: int) -> None:
        if not counts or (budget := step_room(counts, budget)) <= 0:
            return
        dictate = _dictate_behind if self._follows else _dictate
        ready = [
            sequence
            for sequence in running
            if sequence.key in self._drafted
            and sequence.key in counts
            and decodes(sequence)
            and (self._follows or sequence.tokens[-1] != PENDING)
        ]
        fill_rows([(it, partial(dictate, it)) for it in ready], counts, budget)

    def stop(self, sequence: Sequence) -> None:
        sequence.wait_for_drafts(False)
        self._drafted.discard(sequence.key)


def _dictate(sequence: Sequence, most: int) -> list[int]:
    digest = blake3.blake3(bytes(sequence.tokens) + b"drafts").digest()
    count, right, ids = most - digest[0] % 3 * (most // 3), digest[1] % 24, list(sequence.tokens)
    while len(ids) < len(sequence.tokens) + count:
        token = draw(ids, sequence.seed, sequence.choice).token_id
        wrong = len(ids) - len(sequence.tokens) == right
        ids.append((token + 1) % 50 if wrong else token)
    return ids[len(sequence.tokens) :]


def _dictate_behind(sequence: Sequence, most: int) -> list[int]:
    """What comes behind the tokens, of which the last ones are not known; some are wrong."""
    end = len(sequence.tokens)
    ids = sequence.tokens[: end - unknown_tokens(sequence)]
    digest = blake3.blake3(bytes(ids) + b"behind").digest()
    while len(ids) < end + most - digest[0] % 3 * (most // 3):
        ids.append(draw(ids, sequence.seed, sequence.choice).token_id)
    wrong, every = digest[1] % 16, 3 + digest[2] % 9
    drafts = enumerate(ids[end:])
    return [(id_ + (wrong < 8 and i % every == wrong % every)) % 50 for i, id_ in drafts]


class StateMachine:
    """What may be done to a scheduler whose model has states, in any order."""

    def __init__(self, limits: dict) -> None:
        self.limits, self.requests = limits, {}
        self.ended: set[str] = set()
        self.updates = 0
        self.scheduler = make_scheduler(speculator=RandomDrafts(), **limits)
        self.sim = Simulation(self.scheduler)

    def act(self, program: bytes) -> None:
        """Each two bytes: which act, and its argument."""
        for kind, argument in zip(program[::2], program[1::2], strict=False):
            name = ACTS[kind % len(ACTS)]
            note(f"  {name}({argument})")
            getattr(self, name)(argument)
            self.scheduler.check_integrity()

    def step(self, argument: int) -> None:
        for _ in range(1 + argument % 9):
            self.settle()
            self.sim.step()

    def step_ahead(self, argument: int) -> None:
        for _ in range(1 + argument % 9):
            self.sim.run_one(ahead=True)

    def add(self, argument: int) -> None:
        ids, params = BODIES[argument % len(BODIES)]
        request = make_prompt(f"r{len(self.requests)}", ids, **params)
        try:
            self.sim.add(request)
            self.requests[request.request_id] = request
        except (OverloadedError, RequestError):
            pass

    def end(self, argument: int) -> None:
        name = f"r{len(self.requests) - 1 - argument // 2 % 5}"
        if name in self.requests:
            self.ended.add(name)
            if argument % 2:
                self.scheduler.abort(name)
            else:
                self.scheduler.fail(name, "numerical_error", "NaN")

    def preempt(self, argument: int) -> None:
        self.settle()
        self.sim.preempt_all()

    def update(self, argument: int) -> None:
        """Other weights, under which running sequences begin anew, or keep what they have."""
        self.settle()
        keeps, identity = bool(argument % 2), self.limits["prefix_identity"]
        self.updates += 1
        other = identity and b"m%d" % self.updates
        self.scheduler.recompute(other, other_weights=True, keep_keys=keeps)
        kept = {s.version_id for s in self.scheduler.policy.running if s.has_old_keys}
        for rank in self.sim.ranks:
            rank.states.weights, rank.states.old_keys = self.updates, kept

    def forget(self, argument: int) -> None:
        self.scheduler.forget_prefixes()
        if not self.sim.pending:
            self.sim.send(self.scheduler.heartbeat())

    @property
    def counts(self) -> dict[str, int]:
        """How often it did what it is for."""
        states, found = self.scheduler.policy.page_manager.states, self.scheduler.statistics()
        accepted = found.totals.accepted_draft_tokens
        return {
            "taken": states.counts.snapshots_taken,
            "left_behind": sum(len(row.snapshots) for plan in self.sim.plans for row in plan.rows),
            "read": states.counts.snapshots_read,
            "evicted": states.counts.snapshots_evicted,
            "accepted_drafts": accepted,
            "wrong_drafts": found.totals.draft_tokens - accepted,
            "preemptions": found.preemptions,
        }

    def settle(self) -> None:
        """Commit what is pending."""
        while self.sim.pending:
            self.sim.end(self.sim.pending[0])

    def finish(self) -> None:
        """Run to the end: everybody who was not cut short has the answer it gets alone."""
        self.settle()
        self.sim.run(limit=6000)
        for name, request in self.requests.items():
            for choice in range(request.params.n):
                alone = answer_alone(request, choice)
                answer = self.sim.answers.get((name, choice))
                if name not in self.ended:
                    assert answer == alone
                elif answer is not None:
                    assert answer.tokens == alone.tokens[: len(answer.tokens)]
        self.sim.check_idle()
        self.scheduler.forget_prefixes()
        self.sim.check_idle()
        self.check_states()

    def check_states(self) -> None:
        """No slot is held."""
        counts = self.scheduler.policy.page_manager.states.counts
        assert counts.state_slots_used == counts.snapshots_used == 0


class FollowingMachine(StateMachine):
    """What may be done to a scheduler whose rows follow drafts that a step still verifies."""

    def __init__(self, limits: dict) -> None:
        super().__init__(limits)
        limits = limits | {"num_snapshots": None, "follows_drafts": True}
        self.scheduler = make_scheduler(speculator=RandomDrafts(follows=True), **limits)
        self.sim = Simulation(self.scheduler)

    def update(self, argument: int) -> None:
        """Prefill all anew; the model has no weights to change."""
        self.settle()
        self.scheduler.recompute(self.limits["prefix_identity"], other_weights=bool(argument % 2))

    @property
    def counts(self) -> dict[str, int]:
        rows = [row for plan in self.sim.plans for row in plan.rows if row.unverified]
        found = self.scheduler.statistics()
        return {
            "behind": len(rows),
            "with_drafts": sum(row.samples > 1 for row in rows),
            "accepted_drafts": found.totals.accepted_draft_tokens,
            "wrong_drafts": found.totals.draft_tokens - found.totals.accepted_draft_tokens,
            "preemptions": found.preemptions,
        }

    def check_states(self) -> None:
        assert self.scheduler.policy.page_manager.states is None


def run_machine(
    examples: int, seed_: int, shrink: bool = True, machine_of: type[StateMachine] = StateMachine
) -> Counter[str]:
    """Run `examples` of the machine, drawn from `seed_`; what fails is made small or not.

    The result counts how often the runs did what they are for.
    """
    counts: Counter[str] = Counter()

    @seed(seed_)
    @machine_settings(examples, shrink)
    @given(PROGRAMS)
    def run(drawn: tuple[dict, bytes]) -> None:
        limits, program = drawn
        machine = machine_of(limits)
        machine.act(program)
        machine.finish()
        counts.update(machine.counts)

    with small_pages(SIZE):
        run()
    return counts
