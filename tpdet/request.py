"""A request, frozen: token ids and sampling parameters, checked before anything is queued.

Field names follow vLLM and the OpenAI API. Everything derived (a running sequence, its pages, its
output) lives elsewhere; one request's parameters are never changed for another's.
"""

import math
from collections.abc import Iterable

import msgspec

from tpdet.errors import RequestError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MIN_TEMPERATURE = 1e-3
MAX_TEMPERATURE = 2.0
MAX_SCHEMA_BYTES = 64 << 10


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn and when to stop.

    `seed=None` lets the engine draw one from its own seed stream and return it. `top_k` -1 or 0 is
    off. `logprobs=k` returns the chosen token's log-probability and the k likeliest beside it.
    `max_tokens=0` scores the prompt only. `json_schema` (JSON text) is what the answer must follow
    to its end. Raises RequestError, naming the field, when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    json_schema: str | None = None

    @property
    def reads_tokens(self) -> bool:
        """Whether the next token depends on the tokens so far otherwise than by their K/V."""
        return self.penalises or self.json_schema is not None

    @property
    def penalises(self) -> bool:
        """Whether a penalty counts tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature {self.temperature} is too small: use 0 (greedy) or at least "
                f"{MIN_TEMPERATURE}",
                "temperature",
            )
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p 0 keeps nothing: use a value in (0, 1]", "top_p")
        _integer("top_k", self.top_k, -1, MAX_TOP_K)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}: "
                "lower min_tokens or raise max_tokens",
                "min_tokens",
            )
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0.0:
            raise RequestError("repetition_penalty 0 is not above 0", "repetition_penalty")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        _check_stops(self.stop)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} ids; the limit is {MAX_LOGIT_BIAS}",
                "logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)
        _check_schema(self.json_schema)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted unit of work: prompt ids, parameters, and the ids that end a sequence.

    `eos_token_ids` come from the model. Requests share cached prefixes only where both salts are
    equal: `tenant_salt` is the server's, `cache_salt` the client's. The seed inside `params` is
    resolved (never None) by the time a request reaches the scheduler.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    tenant_salt: str = ""


class Candidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token id with its fp32 log-probability."""

    token_id: int
    logprob: float


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one committed token of one choice tells its reader.

    `logprob` is the fp32 log-probability of the model's own distribution (before bias, penalties,
    temperature and filters); `top` holds the likeliest, best first, ties by lowest id. The token
    that ends the sequence has `finish_reason` "stop" (then `stop_token_id` tells which) or
    "length". A choice with `max_tokens=0` sends one output with `token_id` -1. `cached_tokens`,
    told with a choice's first output alone, counts the prompt tokens whose K/V were read from the
    prefix cache; nothing else may depend on it. `dead_end`: the schema allows no token after this
    one, though the text is not complete (`finish_reason` is "length"). `approximate`: the step's
    arithmetic was not the contract's, so no bit of the answer is promised. `rank` is the token's
    among all ids by their logits (1: the likeliest; ties by lowest id), 0 if nobody asked.
    """

    request_id: str
    choice: int
    token_id: int
    logprob: float
    top: tuple[Candidate, ...] = ()
    finish_reason: str | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0
    dead_end: bool = False
    approximate: bool = False
    rank: int = 0


class PromptOutput(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a request's prompt tokens, sent once, before its first token.

    `logprobs[i]` is token i's log-probability given those before it (None for the first), `top[i]`
    the likeliest at that position, `ranks[i]` token i's place among all ids (0 for the first).
    """

    request_id: str
    logprobs: tuple[float | None, ...]
    top: tuple[tuple[Candidate, ...], ...]
    ranks: tuple[int, ...]


class RequestFailed(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended without an answer; `code` is a wire code from `tpdet.errors`."""

    request_id: str
    code: str
    message: str


def with_seed(request: Request, seed: int) -> Request:
    """The same request with its seed resolved."""
    params = msgspec.structs.replace(request.params, seed=seed)
    return msgspec.structs.replace(request, params=params)


def check_against_model(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Refuse what the model cannot serve: empty prompt, ids outside [0, vocab), over-long.

    Raises RequestError with the field, the value and the limit.
    """
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    _check_ids("prompt", prompt, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    total = len(prompt) + params.max_tokens
    if total > max_model_len:
        raise RequestError(
            f"prompt of {len(prompt)} tokens plus max_tokens {params.max_tokens} is {total}, over "
            f"the model's context of {max_model_len}: shorten the prompt or lower max_tokens",
            "max_tokens" if len(prompt) < max_model_len else "prompt",
        )


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} in {field} is outside the vocabulary [0, {vocab_size})", field
            )


def _check_stops(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"{len(stop)} stop strings; the limit is {MAX_STOP_STRINGS}", "stop")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise RequestError("a stop string must be non-empty text", "stop")
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_STOP_BYTES:
            raise RequestError(
                f"a stop string of {size} bytes is over the limit of {MAX_STOP_BYTES}", "stop"
            )


def _check_schema(schema: object) -> None:
    """Whether it is a schema that can be used is found where it is compiled."""
    if schema is None:
        return
    if not isinstance(schema, str):
        raise RequestError(f"json_schema must be JSON text, not {type(schema)}", "response_format")
    size = len(schema.encode("utf-8", "surrogatepass"))
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(
            f"a schema of {size} bytes is over the limit of {MAX_SCHEMA_BYTES}", "response_format"
        )


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} {value} is out of range [{low}, {high}]", name)


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, not {value!r}", name)
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} {value} is out of range [{low}, {high}]", name)
