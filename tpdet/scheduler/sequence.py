"""A sequence: one choice of one request, with its tokens so far and the pages that it holds."""

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from tpdet.cache.prefix import CachedPage, PrefixChain
from tpdet.cache.versions import version_id
from tpdet.control.plan import RowSampling
from tpdet.control.row_messages import RowKey, SampledToken
from tpdet.errors import RequestError
from tpdet.grammar.constraint import Constraint, Next
from tpdet.grammar.schema_start import SchemaStart
from tpdet.kernels.inputs.row_params import PlainParams
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.requests.answer_form import AnswerForm
from tpdet.requests.request import PromptOutput, Request

PENDING = -1  # stands for a token that a pending step samples
PAGE_BYTES, VERSION_BYTES = 4, 8  # of a page's number and of its version in a plan
_IDENTITY = struct.Struct("<qqQ")  # admission, choice, version id: the first columns of a plan
_PAGE, _VERSION = struct.Struct("<i"), struct.Struct("<q")


@dataclass(slots=True, eq=False)
class Sequence:
    """The only mutable object about a request; the request itself is frozen.

    `tokens` are the prompt and the generated tokens, PENDING where a pending step samples one.
    While a pending step computes a row with drafts, the last `drafted` of them are those drafts.
    Positions below `computed` have their K/V in `pages` (held under `versions`), or will have it
    after the pending steps. A preemption empties the pages and sets `computed` to 0, and nothing
    else: generated tokens and prompt scores are kept. The K/V is recomputed, or read from the
    prefix cache, and no output is sent twice.
    """

    request: Request
    key: RowKey  # (admission number, choice): the total order everything follows
    version_id: int
    tokens: list[int]
    computed: int = 0
    pages: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    page_bytes: bytes = b""  # `pages` as they stand in a plan
    version_bytes: bytes = b""  # `versions` likewise
    room: int = 0  # positions that `pages` hold
    finished: bool = False
    poisoned: bool = False  # its pages may hold NaN
    tokens_when_admitted: int = 0
    prompt_scores: list[SampledToken] = field(default_factory=list)
    chain: PrefixChain | None = None  # keys of its full pages
    last_cached: CachedPage | None = None  # parent of its next page in the prefix cache
    offered: int = 0  # pages that were read from the prefix cache or offered to it
    cached_tokens: int | None = None  # how many were read from it when it first got pages
    constraint: Constraint | None = None  # what its schema allows
    sample_index: int = 0  # its token's place among those that the latest step samples
    pending_rows: int = 0  # steps that are not committed and compute a row of it
    drafted: int = 0  # drafts in its row of a pending step
    drafts_are_requested: bool = False  # its request brought them
    waits: bool = False  # for its next token, so that it can carry drafts
    request_id: str = field(init=False)
    identity: bytes = field(init=False)  # admission, choice, version id, as in a plan
    choice: int = field(init=False)  # which of the request's `n` answers this is
    prompt_length: int = field(init=False)  # of the original prompt; no preemption changes it
    generates: bool = field(init=False)  # whether any token is sampled
    full_length: int = field(init=False)  # tokens once the last one is sampled
    scores_prompt: bool = field(init=False)  # the first choice does, if the request asks for it
    reads_results: bool = field(init=False)  # one of its rows may depend on another's results
    reads_always: bool = field(init=False)  # and does so without drafts, too
    penalises: bool = field(init=False)  # a penalty counts the tokens so far
    schema_start: SchemaStart = field(init=False)  # finds where its schema begins
    seed: int = field(init=False)
    least_length: int = field(init=False)  # no token before this position may end it
    ends: frozenset[int] = field(init=False)  # ids that end it
    free_from: int = field(init=False)  # from this position on no id is forbidden
    likeliest: bool = field(init=False)  # its tokens are the likeliest, without others beside them
    looks: bool = field(init=False)  # more than an end may follow from a token: scores, a schema
    plain: bool = field(init=False)  # how it samples is `row_sampling`, and no list of ids
    row_sampling: RowSampling = field(init=False)
    packed_sampling: bytes = field(init=False)  # it, for `PlainRows`

    def __post_init__(self) -> None:
        # Every row of every step reads these: as properties they would double the host's work.
        params = self.request.params
        self.choice = self.key[1]
        self.prompt_length = len(self.request.prompt_token_ids)
        self.generates = self.request.max_tokens > 0
        self.full_length = self.prompt_length + (self.request.max_tokens or sys.maxsize)
        self.scores_prompt = self.choice == 0 and params.prompt_logprobs is not None
        self.reads_always = self.scores_prompt or params.reads_tokens
        self.reads_results = self.reads_always
        self.penalises = params.penalises
        self.schema_start = SchemaStart(params.json_schema_after or (), self.prompt_length)
        self.seed = resolved_seed(self.request)
        self.least_length = self.prompt_length + params.min_tokens
        self.request_id = self.request.request_id
        self.identity = _IDENTITY.pack(*self.key, self.version_id)
        self.ends = frozenset(self.ending_ids())
        self.free_from = self.least_length if self.ends else 0
        listed = bool(params.logit_bias) or params.reads_tokens
        self.likeliest = params.temperature == 0.0 and not listed and not params.logprobs
        self.looks = self.scores_prompt or self.constraint is not None
        self.plain = not listed and self.constraint is None
        self.row_sampling = RowSampling(self.seed, PlainParams.of(params), params.logprobs)
        self.packed_sampling = self.row_sampling.packed(self.choice)

    @classmethod
    def of(
        cls, request: Request, admission: int, choice: int, constraint: Constraint | None = None
    ) -> "Sequence":
        """Choice `choice` of `request`, whose seed is resolved."""
        seed = resolved_seed(request)
        owner = version_id(request.request_id, seed, choice)
        tokens = list(request.prompt_token_ids)
        return cls(request, (admission, choice), owner, tokens, constraint=constraint)

    @property
    def remaining(self) -> int:
        """Tokens still to be computed: 1 while decoding, 0 once the last one is sampled."""
        known = len(self.tokens)
        return known - self.computed if known < self.full_length else 0

    @property
    def awaits_results(self) -> bool:
        """Whether its next row cannot be planned before a pending step is committed.

        True where a penalty, a schema or a draft depends on the token that the step samples, and
        where the step scores the prompt or verifies drafts of it.
        """
        if not self.reads_results:
            return False
        if self.drafted:
            return True
        scored = min(self.computed, self.prompt_length - 1)
        if self.scores_prompt and scored > len(self.prompt_scores):
            return True
        reads_token = self.waits or self.request.params.reads_tokens
        return self.tokens[-1] == PENDING and reads_token

    @property
    def missing_pages(self) -> int:
        """Pages that its known tokens still lack."""
        return -(-len(self.tokens) // PAGE_TOKENS) - len(self.pages)

    @property
    def progressed(self) -> bool:
        """Whether it got a token since it last began to run."""
        return len(self.tokens) > self.tokens_when_admitted

    @property
    def reads_cache(self) -> bool:
        """Whether it may read cached pages: prompt scores need every position computed."""
        return self.request.params.prompt_logprobs is None

    def wait_for_drafts(self, waits: bool) -> None:
        """Whether its next row is planned only when its tokens are known."""
        self.waits = waits
        self.reads_results = waits or self.reads_always

    def hold(self, page: int, version: int) -> None:
        """Take one more page, under its version."""
        self.pages += (page,)
        self.versions += (version,)
        self.page_bytes += _PAGE.pack(page)
        self.version_bytes += _VERSION.pack(version)
        self.room += PAGE_TOKENS

    def let_go(self) -> None:
        """Forget the pages, which were taken back."""
        self.pages = self.versions = ()
        self.page_bytes = self.version_bytes = b""
        self.room = 0

    def ending_ids(self) -> tuple[int, ...]:
        """Ids that end the sequence, ascending."""
        request = self.request
        eos = () if request.params.ignore_eos else request.eos_token_ids
        return tuple(sorted({*eos, *request.params.stop_token_ids}))

    def forbidden_ids(self, position: int) -> tuple[int, ...]:
        """Ids that may not be sampled for `position`, because `min_tokens` is not reached."""
        return self.ending_ids() if position < self.least_length else ()

    def allowed_ids(self, position: int) -> bytes | None:
        """The mask of `next_ids`, a bit an id; it allows none where the schema reaches a limit."""
        try:
            following = self.next_ids(position)
        except RequestError:
            return None if self.constraint is None else self.constraint.nothing
        return None if following is None else following.allowed

    def next_ids(self, position: int) -> Next | None:
        """What its schema allows at `position`, after the tokens before it; None where none holds.

        Raises RequestError when the schema reaches a limit.
        """
        begin = None if self.constraint is None else self.schema_start.begin(self.tokens, position)
        if self.constraint is None or begin is None:
            return None
        request, forbidden = self.request, self.forbidden_ids(position)
        ending = () if request.params.ignore_eos or forbidden else request.eos_token_ids
        following = self.constraint.next_ids(self.tokens[begin:position], ending, forbidden)
        opening = self.schema_start.opening(position)
        if opening is None or opening in forbidden:
            return following
        return following.also(opening)

    def finish_reason(self, position: int) -> str | None:
        """Why the generated token at `position` ends the sequence: "stop", "length", or None."""
        if self.tokens[position] in self.ends:
            return "stop"
        return "length" if position + 1 >= self.full_length else None

    def prompt_output(self) -> PromptOutput:
        """The log-probabilities of the whole prompt; the first token has none."""
        scores = self.prompt_scores
        return PromptOutput(
            self.request.request_id,
            (None, *(score.logprob for score in scores)),
            ((), *(score.top for score in scores)),
            (0, *(score.rank for score in scores)),
        )


def choices_of(
    request: Request, admission: int, constrain: Callable[[AnswerForm], Constraint] | None
) -> list[Sequence]:
    """The `n` sequences of a request. Raises RequestError for a form that cannot be used."""
    form = request.params.form
    if form is not None and constrain is None:
        raise RequestError(f"{form.field} needs a tokenizer: none is loaded", form.field)
    return [
        Sequence.of(request, admission, choice, constrain(form) if form and constrain else None)
        for choice in range(request.params.n)
    ]


def pages_for(positions: int) -> int:
    """Pages that hold `positions` positions."""
    return -(-positions // PAGE_TOKENS)


def resolved_seed(request: Request) -> int:
    """The request's seed; `Scheduler.add` has refused a request without one."""
    seed = request.params.seed
    assert seed is not None
    return seed
