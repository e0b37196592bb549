"""A rank without torch: a paged store of token ids, and a model that is a hash of what it reads.

The next token depends on every token id read back through the row's page table, on the seed, the
choice and the position; so a wrong page, a stale page or a lost token changes the answer. Beside
each id stands a hash of all tokens up to it, as K/V depend on them; a reader checks it. A position
may be broken: what is written there is NAN, and whoever reads it fails.
"""

from dataclasses import dataclass, field

import blake3
import numpy as np

from tpdet.cache.versions import SHARED, VersionTable, version_id
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.plan import ALLOCATE, EVICT, SHARE, Row, StepPlan, decode_plan, encode_plan
from tpdet.request import PromptOutput, Request, RequestFailed, SamplingParams, TokenOutput
from tpdet.sampling_row import SampledToken
from tpdet.scheduler import Scheduler

VOCABULARY = 50
EOS = 7
POISON = -999
NAN = -998
POWERS = np.cumprod(np.full(1 << 14, 1099511628211, dtype=np.uint64))


def make_request(name: str, prompt_length: int = 5, start: int = 0, **params) -> Request:
    """A request whose prompt is a function of its name, with a seed."""
    ids = tuple(
        10 + (len(name) * 31 + ord(name[-1]) + i * i + start) % 40 for i in range(prompt_length)
    )
    return make_prompt(name, ids, **params)


def make_prompt(name: str, ids, tenant: str = "", salt: str = "", **params) -> Request:
    """A request of these prompt ids, with a seed."""
    return Request(
        request_id=name,
        prompt_token_ids=tuple(ids),
        params=SamplingParams(**({"seed": 1} | params)),
        eos_token_ids=(EOS,),
        cache_salt=salt,
        tenant_salt=tenant,
    )


def draw(token_ids, seed: int, choice: int, forbidden=()) -> SampledToken:
    """The token after `token_ids`: a hash, stepped on past the forbidden ids."""
    body = np.asarray(token_ids, dtype="<i4").tobytes() + f"|{seed}|{choice}".encode()
    value = int.from_bytes(blake3.blake3(body).digest(length=8), "little")
    token = value % VOCABULARY
    while token in forbidden:
        token = (token + 1) % VOCABULARY
    return SampledToken(token, -(value % 1000) / 8)


def score(token_ids, target: int) -> SampledToken:
    """A score of `target` after `token_ids`."""
    return SampledToken(target, draw(token_ids, 0, 0).logprob)


@dataclass
class Answer:
    """What a reader of one choice (or, under choice -1, of the request) has heard."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


def answer_alone(request: Request, choice: int) -> Answer:
    """The answer by definition: no scheduler, no pages."""
    params, ids, answer = request.params, list(request.prompt_token_ids), Answer()
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
    if params.max_tokens == 0:
        return Answer([-1], [0.0], "length")
    while answer.finish is None:
        forbidden = ending if len(answer.tokens) < params.min_tokens else ()
        token = draw(ids, params.seed, choice, forbidden)
        ids.append(token.token_id)
        answer.tokens.append(token.token_id)
        answer.logprobs.append(token.logprob)
        if token.token_id in ending:
            answer.finish = "stop"
        elif len(answer.tokens) == params.max_tokens:
            answer.finish = "length"
    return answer


def scores_alone(request: Request) -> tuple[float | None, ...]:
    ids = request.prompt_token_ids
    return (None, *(score(ids[:i], ids[i]).logprob for i in range(1, len(ids))))


class FakeRank:
    """Applies plans as a rank must, and keeps K/V as token ids in pages."""

    def __init__(self, num_pages: int) -> None:
        self.table = VersionTable(num_pages)
        self.store = np.full((num_pages, PAGE_TOKENS), POISON, dtype="<i4")
        self.before = np.zeros((num_pages, PAGE_TOKENS), dtype=np.uint64)

    def receive(
        self, plan: StepPlan, drawn: list[int], broken: frozenset[tuple[int, int]] = frozenset()
    ) -> None:
        """Apply the events, compare digests, check the readers, write the step's K/V.

        drawn: the tokens of the step before, which negative ids stand for. broken: positions
        of owners where NAN is written.
        """
        self.table.apply(plan.events)
        assert self.table.digest() == plan.table_digest
        self.table.check_readers(plan.rows)
        for event in plan.events:
            if event.kind in (ALLOCATE, EVICT):
                self.store[event.page] = POISON
        for row in plan.rows:
            ids = [
                NAN if (row.version_id, row.start + offset) in broken
                else token if token >= 0 else drawn[-1 - token]
                for offset, token in enumerate(row.token_ids)
            ]  # fmt: skip
            places = np.arange(row.start, row.start + len(ids))
            pages, slots = np.asarray(row.pages)[places // PAGE_TOKENS], places % PAGE_TOKENS
            earlier = np.uint64(0)
            if row.start:
                page, slot = divmod(row.start - 1, PAGE_TOKENS)
                earlier = self.before[row.pages[page], slot]
            self.store[pages, slots] = ids
            self.before[pages, slots] = earlier + prefix_hashes(np.asarray(ids), row.start)

    def read(self, row: Row, length: int) -> np.ndarray:
        """The first `length` token ids, read through the row's pages."""
        pages = list(row.pages)
        ids = self.store[pages].reshape(-1)[:length]
        assert not (ids == POISON).any()
        before = self.before[pages].reshape(-1)[:length]
        assert (before == prefix_hashes(ids, 0)).all(), "K/V of another prefix"
        return ids


def prefix_hashes(ids: np.ndarray, start: int) -> np.ndarray:
    """A hash of ids[:i + 1] at i; those of a whole are the sums of its parts'."""
    return (ids.astype(np.uint64) * POWERS[start : start + len(ids)]).cumsum()


class Simulation:
    """A scheduler, rank 0, a second rank that gets plans as bytes, and the readers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        pages = scheduler.roster.ledger.num_pages
        self.ranks = [FakeRank(pages), FakeRank(pages)]
        self.answers: dict[tuple[str, int], Answer] = {}
        self.prompt_outputs: dict[str, PromptOutput] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.plans: list[StepPlan] = []
        self.flying: list[StepPlan] = []
        self.results: dict[int, tuple[dict, dict]] = {}
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

    def begin(self, ahead: bool = False) -> StepPlan | None:
        """Schedule, send the plan to both ranks, which run it."""
        plan = self.scheduler.schedule_ahead() if ahead else self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.flying.append(plan)
            self.send(plan)
            self.results[plan.step] = self.sample(plan)
        return plan

    def send(self, plan: StepPlan) -> None:
        self.ranks[0].receive(plan, self.drawn, self.broken)
        self.ranks[1].receive(decode_plan(encode_plan(plan)), self.drawn, self.broken)
        self.check_salts(plan)
        assert self.ranks[0].table.full_digest() == self.ranks[1].table.full_digest()

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

    def sample(self, plan: StepPlan) -> tuple[dict, dict]:
        """Tokens and scores by sequence; a sequence that reads NAN gets neither."""
        sampled, scores, drawn = {}, {}, []
        for row, sampling, scoring in zip(plan.rows, *self.scheduler.wanted(plan), strict=True):
            wanted = 0
            end = row.start + len(row.token_ids)
            if row.logits and NAN in self.ranks[0].read(row, end):
                drawn += [0] * row.draws
                continue
            if scoring is not None:
                wanted = end - scoring.start
                scores[scoring.key] = [
                    score(self.ranks[0].read(row, scoring.start + j + 1), target)
                    for j, target in enumerate(scoring.target_ids)
                ]
            assert row.draws is (sampling is not None)
            if sampling is not None:
                wanted = max(wanted, 1)
                ids = self.ranks[1].read(row, end)
                assert sampling.position == end
                assert not sampling.token_ids or list(sampling.token_ids) == list(ids)
                sampled[sampling.key] = draw(
                    ids, sampling.seed, sampling.choice, sampling.forbidden_ids
                )
                drawn.append(sampled[sampling.key].token_id)
            assert row.logits >= wanted
        self.drawn, self.drawn_before = drawn, self.drawn
        return sampled, scores

    def end(self, plan: StepPlan) -> None:
        """Commit."""
        self.flying.remove(plan)
        for row, sequence in self.scheduler._in_flight.oldest(plan.step).rows:
            if row.logits and NAN in self.ranks[0].read(row, row.start + len(row.token_ids)):
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
        if not self.flying:
            self.begin()
        if self.flying:
            self.begin(ahead=True)
            self.end(self.flying[0])
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
        ledger = self.scheduler.roster.ledger
        assert ledger.free_count == ledger.num_pages
        assert ledger.table.full_digest() == self.ranks[1].table.full_digest()

    def check_answer(self, request: Request) -> None:
        """Every choice of `request` got what it gets alone."""
        for choice in range(request.params.n):
            assert self.answers[request.request_id, choice] == answer_alone(request, choice)
        if request.params.prompt_logprobs is not None:
            told = self.prompt_outputs[request.request_id]
            assert told.logprobs == scores_alone(request)
            assert len(told.top) == len(request.prompt_token_ids)


def make_scheduler(others_per_absent: int = 1, **settings) -> Scheduler:
    """A small scheduler; every limit may be overridden.

    Its batches are too small for ten others beside each sequence that a step ahead leaves out.
    """
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_pages": 16,
        "max_queue": 100,
        "max_model_len": 4096,
    }
    scheduler = Scheduler(**{**defaults, **settings})
    scheduler.roster.others_per_absent = others_per_absent
    return scheduler
