"""A sequence: one choice of one request, with its tokens so far and the pages that it holds."""

import struct
from collections import abc
from dataclasses import dataclass, field
from typing import Any

from tpdet.cache.prefix import PrefixUse
from tpdet.cache.state_use import StateUse
from tpdet.control.row_messages import SampledToken
from tpdet.errors import RequestError
from tpdet.grammar.constraint import Constraint, Next
from tpdet.grammar.schema_start import SchemaStart
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.requests.request import Request
from tpdet.scheduler.traits import SequenceTraits

PENDING = -1  # stands for a token that a pending step samples
PAGE_BYTES, VERSION_BYTES = 4, 8  # of a page's number and of its version in a plan
_PAGE, _VERSION = struct.Struct("<i"), struct.Struct("<q")


@dataclass(slots=True, eq=False)
class Sequence(SequenceTraits):
    """The only mutable object about a request; the request and the traits never change.

    `tokens` are the prompt and the generated tokens, PENDING where a pending step samples one.
    While a pending step computes a row with drafts, the last `drafted` of them are those drafts.
    The step behind may have a row of it, too, which begins where a draft is wrong: `expected` is
    what that row expects (`Row.expected`), until the drafts are verified.
    Positions below `computed` have their K/V in `pages` (held under `versions`), or will have it
    after the pending steps. A preemption empties the pages and sets `computed` to 0, and nothing
    else: generated tokens and prompt scores are kept. The K/V is recomputed, or read from the
    prefix cache, and no output is sent twice.

    Who writes what: tokens and `computed` the methods here, pages the page manager, `prefix` the
    prefix cache, the rest of the fields the file that their comment names.
    """

    tokens: list[int] = field(init=False)
    computed: int = 0
    pages: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    page_bytes: bytes = b""  # `pages` as they stand in a plan
    version_bytes: bytes = b""  # `versions` likewise
    room: int = 0  # positions that `pages` hold
    prefix: PrefixUse = field(default_factory=PrefixUse)
    states: StateUse | None = None  # state_slots: while it runs, if the model has such layers
    finished: bool = False  # scheduler
    poisoned: bool = False  # scheduler: its pages may hold NaN
    tokens_when_admitted: int = 0  # policy
    prompt_scores: list[SampledToken] = field(default_factory=list)  # results
    sample_index: int = 0  # its token's index among those that the latest step samples
    pending_rows: int = 0  # pending_steps: those that are not committed and compute a row of it
    drafted: int = 0  # drafts in its row of a pending step
    expected: list[int] = field(default_factory=list)  # by its row behind that; often empty
    may_follow: bool = False  # scheduler: plans may have rows behind unverified drafts
    follows: bool = False  # policy: the step that is planned may have one of it
    drafts_are_requested: bool = False  # its request brought them
    waits: bool = False  # for its next token, so that it can carry drafts
    pooled: tuple[Any, Any] | None = None  # engine/pooling: tensors of its rows so far
    has_old_keys: bool = False  # policy: other weights than the present ones computed some
    reads_results: bool = field(init=False)  # one of its rows may depend on another's results
    schema_start: SchemaStart = field(init=False)  # finds where its schema begins

    def __post_init__(self) -> None:
        super(Sequence, self).__post_init__()
        self.tokens = list(self.request.prompt_token_ids)
        self.reads_results = self.reads_always
        marks = self.request.params.json_schema_after or ()
        self.schema_start = SchemaStart(marks, self.prompt_length)

    @classmethod
    def of(
        cls, request: Request, admission: int, choice: int, constraint: Constraint | None = None
    ) -> "Sequence":
        """Choice `choice` of `request`, whose seed is resolved."""
        return cls(request, (admission, choice), constraint)

    @property
    def remaining(self) -> int:
        """Tokens still to be computed: 1 while decoding, 0 once the last one is sampled."""
        if unverified_drafts(self):
            return 1
        known = len(self.tokens)
        return known - self.computed if known < self.full_length else 0

    @property
    def awaits_results(self) -> bool:
        """Whether its next row cannot be planned before a pending step is committed.

        True where a penalty, a schema or a draft depends on the token that the step samples, and
        where the step scores the prompt or verifies drafts that no row may follow.
        """
        if not self.reads_results:
            return False
        if self.drafted:
            return not self.follows
        scored = min(self.computed, self.prompt_length - 1)
        if self.scores_prompt and scored > next_scored(self):
            return True
        reads_token = self.waits or self.request.params.reads_tokens
        return self.tokens[-1] == PENDING and reads_token

    @property
    def missing_pages(self) -> int:
        """Pages that its tokens, and the one behind unverified drafts, still lack."""
        return pages_for(len(self.tokens) + (self.drafted > 0)) - len(self.pages)

    @property
    def progressed(self) -> bool:
        """Whether it got a token since it last began to run."""
        return len(self.tokens) > self.tokens_when_admitted

    def wait_for_drafts(self, waits: bool) -> None:
        """Whether its next row is planned only when its tokens are known."""
        self.waits = waits
        self.reads_results = waits or self.reads_always or self.drafted > 0

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

    def begin_row(self, end: int, samples: int, sampled_before: int) -> None:
        """A step computes its tokens before position `end`, and samples so many after them.

        sampled_before: tokens that the rows before this one sample.
        """
        self.pending_rows += 1
        if samples:
            self.sample_index = sampled_before
        if self.expected:  # its end is known when the step before is committed
            return
        if self.states is not None:
            self.states.follow(self.computed, end, samples > 1)
        self.computed = end
        if samples == 1:
            self.tokens.append(PENDING)

    def add_drafts(self, drafts: abc.Sequence[int]) -> None:
        """Put drafts behind its tokens, for its next row."""
        self.tokens += drafts
        self.drafted += len(drafts)
        self.reads_results = True

    def take_drafts(self) -> list[int]:
        """Take the drafts from behind its tokens, and give them back."""
        begin = len(self.tokens) - self.drafted
        drafts = self.tokens[begin:]
        del self.tokens[begin:]
        self.schema_start.take_back(begin)
        self.drafted = 0
        self.reads_results = self.waits or self.reads_always
        return drafts

    def forget_computed(self) -> None:
        """Compute all tokens anew, as its pages were taken."""
        self.computed = 0
        self.has_old_keys = False
        if self.constraint is not None:
            self.constraint.forget()

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


def unverified_drafts(sequence: Sequence) -> int:
    """Drafts at its end that a pending step verifies; its next row begins by their results."""
    return sequence.drafted if sequence.computed == len(sequence.tokens) else 0


def unknown_tokens(sequence: Sequence) -> int:
    """Tokens at its end that only a pending step's results will tell."""
    return unverified_drafts(sequence) or int(sequence.tokens[-1] == PENDING)


def follow_drafts(sequence: Sequence, following: abc.Sequence[int]) -> None:
    """Have its next row follow unverified drafts: the token expected behind them, then drafts.

    following: none where nothing is expected, and that row has no drafts.
    """
    sequence.expected = [*sequence.tokens[-sequence.drafted :], *(following or (0,))]


def settle_row(sequence: Sequence, accepted: int, drafts: int) -> None:
    """Begin the row that followed drafts behind the `accepted` right ones, with its `drafts`.

    The token behind those stands at the end of its tokens.
    """
    if drafts:
        sequence.add_drafts(sequence.expected[accepted + 1 : accepted + 1 + drafts])
    sequence.computed = len(sequence.tokens)
    if not drafts:
        sequence.tokens.append(PENDING)
    sequence.expected = []


def awaits_known_answer(sequence: Sequence) -> bool:
    """Whether it awaits results only because its next row is to carry its request's drafts."""
    return sequence.waits and bool(sequence.request.drafts)


def known_drafts(sequence: Sequence) -> int:
    """Drafts of its request that a row of it could carry now, in the pages that it has."""
    known, first = len(sequence.tokens), sequence.prompt_length
    if not awaits_known_answer(sequence) or sequence.awaits_results or known == first:
        return 0
    answer = sequence.request.drafts[sequence.choice]
    end = min(first + len(answer), sequence.room, sequence.full_length - 1)
    return max(0, end - known)


def next_scored(sequence: Sequence) -> int:
    """The position of a scored prompt's next score, which is of the token behind it."""
    return sequence.first_scored + len(sequence.prompt_scores)


def readable_tokens(sequence: Sequence) -> int:
    """Tokens that may be read from the prefix cache, at most: one at least is computed."""
    most, following = len(sequence.tokens) - 1, next_scored(sequence)
    unscored = sequence.scores_prompt and following < sequence.prompt_length - 1
    return min(most, following) if unscored else most


def pages_for(positions: int) -> int:
    """Pages that hold `positions` positions."""
    return -(-positions // PAGE_TOKENS)
