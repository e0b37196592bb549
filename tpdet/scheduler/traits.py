"""The traits of a sequence: what one choice of one request says once and for all."""

import struct
import sys
from dataclasses import dataclass, field

from tpdet.cache.versions import version_id
from tpdet.control.plan import RowSampling
from tpdet.control.row_messages import Beside, RowKey
from tpdet.grammar.constraint import Constraint
from tpdet.kernels.inputs.row_params import PlainParams
from tpdet.requests.request import Request

_IDENTITY = struct.Struct("<qqQ")  # admission, choice, version id: the first columns of a plan


@dataclass(slots=True, eq=False)
class SequenceTraits:
    """Nothing here is written after the request was admitted; its seed is resolved."""

    request: Request
    key: RowKey  # (admission number, choice): the total order everything follows
    constraint: Constraint | None  # what its schema allows
    request_id: str = field(init=False)
    choice: int = field(init=False)  # which of the request's `n` answers this is
    seed: int = field(init=False)
    version_id: int = field(init=False)  # under which it owns pages
    identity: bytes = field(init=False)  # admission, choice, version id, as in a plan
    prompt_length: int = field(init=False)  # of the original prompt; no preemption changes it
    full_length: int = field(init=False)  # tokens once the last one is sampled
    least_length: int = field(init=False)  # no token before this position may end it
    free_from: int = field(init=False)  # from this position on no id is forbidden
    ends: frozenset[int] = field(init=False)  # ids that end it
    generates: bool = field(init=False)  # whether any token is sampled
    scores_prompt: bool = field(init=False)  # the first choice does, if the request asks for it
    first_scored: int = field(init=False)  # of a scored prompt, the first position with a score
    reads_cache: bool = field(init=False)  # cached pages, up to where the prompt's scores begin
    pools_all: bool = field(init=False)  # its answer is of all its rows
    reads_always: bool = field(init=False)  # a row may depend on results, without drafts, too
    penalises: bool = field(init=False)  # a penalty counts the tokens so far
    likeliest: bool = field(init=False)  # its tokens are the likeliest, without others beside them
    looks: bool = field(init=False)  # more than an end may follow from a token: scores, a schema
    plain: bool = field(init=False)  # how it samples is `row_sampling`, and no list of ids
    beside: Beside = field(init=False)  # what is shown beside each sampled token
    row_sampling: RowSampling = field(init=False)
    packed_sampling: bytes = field(init=False)  # it, for `PlainRows`

    def __post_init__(self) -> None:
        # Every row of every step reads these: as properties they would double the host's work.
        request, params = self.request, self.request.params
        assert params.seed is not None  # `check_fits` refused a request without one
        self.request_id, self.choice, self.seed = request.request_id, self.key[1], params.seed
        self.version_id = version_id(self.request_id, self.seed, self.choice)
        self.identity = _IDENTITY.pack(*self.key, self.version_id)
        self.prompt_length = len(request.prompt_token_ids)
        self.full_length = self.prompt_length + (request.max_tokens or sys.maxsize)
        self.least_length = self.prompt_length + params.min_tokens
        self.ends = frozenset(self.ending_ids())
        self.free_from = self.least_length if self.ends else 0
        self.generates = request.max_tokens > 0
        self.scores_prompt = self.choice == 0 and params.prompt_logprobs is not None
        last = params.prompt_logprobs_last_n
        self.first_scored = 0 if last is None else max(0, self.prompt_length - 1 - last)
        pooling = request.pooling
        self.pools_all = pooling is not None and pooling.row != "last"
        self.reads_cache = params.prompt_logprobs is None or self.first_scored > 0
        if self.pools_all:
            self.reads_cache = False
        self.reads_always = self.scores_prompt or params.reads_tokens or pooling is not None
        self.penalises = params.penalises
        listed = bool(params.logit_bias) or params.reads_tokens
        self.likeliest = params.temperature == 0.0 and not listed and not params.logprobs
        self.looks = self.scores_prompt or self.constraint is not None
        self.plain = not (listed or params.logprob_token_ids) and self.constraint is None
        self.beside = params.logprob_token_ids or params.logprobs
        self.row_sampling = RowSampling(self.seed, PlainParams.of(params), params.logprobs)
        self.packed_sampling = self.row_sampling.packed(self.choice)

    def ending_ids(self) -> tuple[int, ...]:
        """Ids that end the sequence, ascending."""
        request = self.request
        eos = () if request.params.ignore_eos else request.eos_token_ids
        return tuple(sorted({*eos, *request.params.stop_token_ids}))

    def forbidden_ids(self, position: int) -> tuple[int, ...]:
        """Ids that may not be sampled for `position`, because `min_tokens` is not reached."""
        return self.ending_ids() if position < self.least_length else ()
