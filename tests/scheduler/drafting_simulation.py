"""A server's loop without a model: real plans and real speculation, and a GPU's times of steps.

Times are those of Qwen3-8B's shape on an H200, by the positions of a step and by whether it was
awaited: launched only when the results of the step before were read. A draft model's are those of
Qwen3-0.6B's shape.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from tpdet.control.plan import StepPlan
from tpdet.control.row_messages import RowKey, SampledToken
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.requests.request import Request, SamplingParams
from tpdet.runner.graphs.draft_graphs import USUAL_SEQUENCES, draft_shape, usual_shapes
from tpdet.scheduler import Scheduler
from tpdet.scheduler.pending_steps import PendingStep
from tpdet.scheduler.sequence import Sequence
from tpdet.speculative.acceptance import PROOF, AcceptanceRates
from tpdet.speculative.draft_model.times import DraftTimes
from tpdet.speculative.proposers.proposer import DRAFT_MODEL
from tpdet.speculative.speculator import DraftSpeculator

PLAIN = (4.448, 4.448, 4.522, 4.545, 4.723, 4.966, 5.557, 6.617, 9.811)
AWAITED = (5.047, 5.047, 5.117, 5.204, 5.234, 5.697, 6.254, 7.056, 8.642)
"""Milliseconds of a step of 1, 2, 4, .. 256 positions."""
PROMPTS, LOOK = 9e-3, 4e-6
"""Seconds of a step with prompts, and of one look of a drafter."""
PROMPT, WIDTH = 8, 32
CAPTURE, SMALL_CAPTURE, SAMPLING_CAPTURE = 0.035, 0.03, 0.01
"""Seconds of the first use of a graph: of a step with drafts, and two kinds of a draft model's."""
SMALL_STEP, LARGE_STEP, FIRST_STEP = 0.92e-3, 1.7e-3, 0.6e-3
"""Seconds of a draft model's step of up to 4 sequences and of more; what a call's first adds."""
SMALL_PROMPT, SMALL_TOKEN = 0.5e-3, 8e-6
"""What a first step adds in which it computes prompts, and each of their tokens."""


@dataclass
class Clock:
    """Time, which passes when somebody says so."""

    now: float = 1.0

    def __call__(self) -> float:
        return self.now


class Teller:
    """Knows its sequence's answer, and says each token rightly with a chance.

    A look finds something with the chance `finds`.
    """

    name, is_spent = "teller", False

    def __init__(self, key, first, chance, draw, clock, match_length=64, finds=1.0):
        self._key, self._first, self._chance, self._draw = key, first, chance, draw
        self._clock, self._length, self._finds, self._end = clock, match_length, finds, 0

    def match(self, tokens: Rows[int], end: int) -> int:
        self._clock.now += LOOK
        self._end = end
        return self._length if self._draw.random() < self._finds else 0

    def propose(self, most: int) -> list[int]:
        right = (answer(self._key, self._end + i) for i in range(most))
        return [id_ if self._draw.random() < self._chance else id_ + 1 for id_ in right]


class SmallModel:
    """A draft model that says each token rightly with a chance; its graphs are captured in time."""

    def __init__(
        self, clock: Clock, chance: float, times: DraftTimes, captured: set, seed: int
    ) -> None:
        self._clock, self._chance, self._captured = clock, chance, captured
        self.times, self._draw = times, random.Random(f"{seed} {chance}")
        self._copies: dict[RowKey, list[int]] = {}

    def captures(self, sequences: int) -> bool:
        return sequences > USUAL_SEQUENCES

    def lags(self, sequence: Sequence) -> bool:
        return self._lacking(sequence) > 2

    def forget(self, key: RowKey) -> None:
        self._copies.pop(key, None)

    def draft(self, requests: Rows[tuple[Sequence, int]]) -> list[list[int]]:
        self.times.begin(len(requests))
        step = SMALL_STEP if len(requests) <= 4 else LARGE_STEP
        lacking = [self._lacking(sequence) for sequence, _ in requests]
        sequences = (len(requests) - 1).bit_length()
        if max(lacking) > 2:
            self._clock.now += SMALL_PROMPT + SMALL_TOKEN * sum(lacking)
        elif max(lacking) == 2:
            self._capture(("pair", sequences), SMALL_CAPTURE)
        self._clock.now += step + FIRST_STEP
        self.times.end(max(lacking) <= 2, sequences=len(lacking))
        for _ in range(max(count for _, count in requests) - 1):
            self._capture(("sample", sequences), SAMPLING_CAPTURE)
            self._clock.now += step
            self.times.end(True)
        self.times.finish()
        return [self._say(sequence, count) for sequence, count in requests]

    def _lacking(self, sequence: Sequence) -> int:
        """Tokens that its copy has not computed: the last one of a copy is only sampled."""
        copy = self._copies.get(sequence.key, [])[:-1]
        pairs = zip(copy, sequence.tokens, strict=False)
        same = next((i for i, (mine, its) in enumerate(pairs) if mine != its), len(copy))
        return len(sequence.tokens) - min(same, len(sequence.tokens) - 1)

    def _capture(self, graph: tuple, seconds: float) -> None:
        usual = graph[1] <= USUAL_SEQUENCES.bit_length() - 1
        self._clock.now += 0.0 if usual or graph in self._captured else seconds
        if not usual:
            self._captured.add(graph)

    def _say(self, sequence: Sequence, count: int) -> list[int]:
        end = len(sequence.tokens)
        right = (answer(sequence.key, end + i) for i in range(count))
        told = [id_ if self._draw.random() < self._chance else id_ + 1 for id_ in right]
        self._copies[sequence.key] = [*sequence.tokens, *told]
        return told


def answer(key: tuple[int, int], position: int) -> int:
    """The token at a position of a sequence."""
    return 2 * ((position * 7919 + key[0] * 104729) % 50_000)


@dataclass
class Server:
    """A scheduler and its clock; what is learned stays from run to run.

    captures: steps with drafts need graphs, which the first step of a kind captures. model: the
    chance with which drafts of a draft model are right, which then is the only drafter; proof: how
    many must have been right before any is verified. follows: rows may follow drafts that a step
    still verifies.
    """

    times: tuple[Rows[float], Rows[float]] = (PLAIN, AWAITED)
    captures: bool = False
    model: float | None = None
    proof: int = PROOF
    seed: int = 0
    follows: bool = False
    planned: dict[int, PendingStep] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    captured: set = field(default_factory=set)
    captured_at_start: frozenset = frozenset()

    def __post_init__(self) -> None:
        model, rates = None, AcceptanceRates(self.proof)
        if self.model is not None:
            times = DraftTimes(60.0, self.clock)
            model = SmallModel(self.clock, self.model, times, self.captured, self.seed)
            self.captured_at_start = frozenset(usual_shapes(64, WIDTH, SHORT_TOKENS))
        self._teller: Callable[[Sequence], Teller] | None = None  # of the requests that run
        first = self._tell if model is None else None
        names = (DRAFT_MODEL,)
        self.speculator = DraftSpeculator(names, True, self.clock, model, rates, first=first)
        how = {"speculator": self.speculator, "follows_drafts": self.follows}
        self.scheduler = Scheduler(64, 8192, 4096, 1024, 1 << 16, **how)
        self.steps = self._served = 0
        self._free = 0.0  # when the GPU has ended all that was launched

    def _tell(self, sequence: Sequence) -> Teller:
        assert self._teller is not None
        return self._teller(sequence)

    def tokens_per_second(
        self, tokens: int, chances: Rows[float | None], seed: int = 0, whole=True, **teller
    ) -> float:
        """Of requests that come together, one for each chance of a draft to be right.

        Not `whole`: while all of them run, until they have so many tokens on the average.
        """
        draw = random.Random(f"{seed} {tokens} {chances}")
        first = self._served

        def drafter(sequence: Sequence) -> Teller:
            chance = chances[sequence.key[0] - first]
            how = {"finds": 0.0} if chance is None else teller
            return Teller(sequence.key, PROMPT, chance or 0.0, draw, self.clock, **how)

        self._teller = drafter
        most = tokens if whole else 64 * tokens
        params = SamplingParams(max_tokens=most, ignore_eos=True, seed=1)
        for _ in chances:
            name = f"r{self._served}"
            self._served += 1
            prompt = (1,) * PROMPT
            self.scheduler.add(Request(request_id=name, prompt_token_ids=prompt, params=params))
        before = self._ended = self.clock.now
        made = self._run(tokens * len(chances))
        for i in range(first, self._served):
            self.scheduler.abort(f"r{i}")
        return made / (self.clock.now - before)

    def _run(self, tokens: int) -> int:
        """Steps as an engine makes them, until there are so many tokens: how many came."""
        made, pending = 0, []
        while made < tokens or pending:
            for plan_next in (self.scheduler.schedule, self.scheduler.schedule_ahead):
                if made >= tokens or (plan_next == self.scheduler.schedule and pending):
                    continue
                awaited = not pending
                if (plan := plan_next()) is not None:
                    self.planned[plan.step] = self.scheduler.latest(plan)
                    pending.append((plan, awaited, self._launch(plan, awaited)))
            self.speculator.running()
            made += self._finish(*pending.pop(0))
        return made

    def _launch(self, plan: StepPlan, awaited: bool) -> float:
        """When the step will end: what was planned ahead begins behind the one before."""
        seconds = PROMPTS
        if _decodes(plan):
            positions = int(plan.rows.count.sum())
            if self.captures and plan.rows.verifies and plan.rows.count.max() <= 16:
                shape = draft_shape(plan.rows, positions, WIDTH)
                if shape not in self.captured | self.captured_at_start:
                    self.clock.now += CAPTURE
                    self.captured.add(shape)
            seconds = 1e-3 * self.times[awaited][(positions - 1).bit_length()]
            if positions > len(plan.rows) and not awaited:  # as one that waited, but for the wait
                ahead, waited = (it[(len(plan.rows) - 1).bit_length()] for it in self.times)
                awaits = self.times[True][(positions - 1).bit_length()]
                seconds = 1e-3 * (awaits - waited + ahead)
        self._free = max(self._free, self.clock.now) + seconds
        return self._free

    def _finish(self, plan: StepPlan, awaited: bool, ends: float) -> int:
        self.clock.now = max(self.clock.now, ends)
        self.steps += 1
        positions = int(plan.rows.count.sum()) if _decodes(plan) else 0
        self.speculator.observe(positions, awaited, self.clock.now - self._ended)
        self._ended = self.clock.now
        sampled, runs = {}, {}
        ends = self.planned.pop(plan.step).ends  # rows behind drafts are settled
        for row, end in zip(plan.rows, ends, strict=True):
            key = row.admission, row.choice
            ids = [
                SampledToken(answer(key, place), 0.0)
                for place in range(end - row.samples + 1, end + 1)
            ]
            if row.samples == 1:
                sampled[key] = ids[0]
            elif row.samples:
                runs[key] = ids
        return len(self.scheduler.commit(plan.step, sampled, runs=runs))


def _decodes(plan: StepPlan) -> bool:
    return bool((plan.rows.count == plan.rows.samples).all())
