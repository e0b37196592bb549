"""Requests and their outputs, frozen: token ids and sampling parameters, checked before queueing.

Field names follow vLLM and the OpenAI API. Everything derived (a running sequence, its pages, its
text) is elsewhere.
"""

from collections.abc import Collection

import msgspec

from tpdet.errors import IntegrityError, RequestError
from tpdet.requests.pooling_params import PoolingParams
from tpdet.requests.sampling_params import SamplingParams

__all__ = [
    "ABORTED", "Candidate", "PooledOutput", "PromptOutput", "Request", "RequestFailed",
    "SamplingParams", "TokenOutput", "check_against_model", "with_seed",
]  # fmt: skip


ABORTED = "abort"
"""The finish reason of a choice that somebody ended early."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's token ids, its sampling parameters, and the ids that end a sequence.

    `eos_token_ids` come from the model. Requests share cached prefixes only where both salts are
    equal: `tenant_salt` is the server's, `cache_salt` the client's. The seed inside `params` is
    resolved (never None) by the time a request reaches the scheduler. `drafts[i]` predicts
    choice i's output, from its first token on. `prediction` predicts the output of every choice
    without drafts: the text that it edits, for example. Neither changes a bit of the answer.
    `resumed[i]` is the number of choice i's tokens that the client has from an earlier answer.
    `pooling`: the answer is made of the prompt's rows, and no token is sampled.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    tenant_salt: str = ""
    drafts: tuple[tuple[int, ...], ...] = ()
    prediction: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    pooling: PoolingParams | None = None

    @property
    def max_tokens(self) -> int:
        """Tokens to generate, at most. Raises IntegrityError if the limit was not resolved."""
        if self.params.max_tokens is None:
            raise IntegrityError(f"request {self.request_id} has no max_tokens: resolve it first")
        return self.params.max_tokens


class Candidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token id with its fp32 log-probability."""

    token_id: int
    logprob: float


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One committed token of one choice, for its reader.

    `logprob` is the fp32 log-probability of the model's own distribution (before bias, penalties,
    temperature and filters); `top` holds the likeliest, best first, ties by lowest id. The token
    that ends the sequence has `finish_reason` "stop" (then `stop_token_id` names it) or "length". A
    choice with `max_tokens=0` has one output, with `token_id` -1. `cached_tokens`, only in a
    choice's first output, counts the prompt tokens whose K/V were read from the prefix cache;
    nothing else may depend on it. `dead_end`: the schema allows no token after this one, though the
    text is not complete (`finish_reason` is "length"). `approximate`: the step's arithmetic was not
    the contract's, so no bit of the answer is promised. `rank` is the token's place among all ids
    by logit (1: the likeliest; ties by lowest id), 0 if it was not requested. The first token of a
    row with tokens of the request's drafts or prediction says how many they were (`draft_tokens`),
    and how many of them were sampled (`accepted_draft_tokens`). The last output of a choice may
    hold which experts its tokens chose, its prompt's too: `routed_experts`, int16 [tokens, layers,
    k], of all tokens but the last. A choice that was ended early has a last output with `token_id`
    -1 and `finish_reason` "abort". `weights`: how many updates of the weights came before those
    that computed the token; -1 - n says that those of n did, with keys and values of others.
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
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    routed_experts: bytes = b""
    weights: int = 0


class PromptOutput(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a request's prompt tokens, sent once, before its first token.

    `logprobs[i]` is the log-probability of token i after the tokens before it (None for the first,
    and for all but the last `prompt_logprobs_last_n`). `top[i]` are the likeliest tokens there, and
    `ranks[i]` is token i's place among all ids (0 where there is no log-probability).
    `weights`: as in `TokenOutput`.
    """

    request_id: str
    logprobs: tuple[float | None, ...]
    top: tuple[tuple[Candidate, ...], ...]
    ranks: tuple[int, ...]
    weights: int = 0


class PooledOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The answer to a prompt that is pooled: a vector, labels or a score, fp32 little-endian.

    `cached_tokens`, `weights`: as in `TokenOutput`.
    """

    request_id: str
    values: bytes
    cached_tokens: int = 0
    weights: int = 0


class RequestFailed(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended without an answer; `code` is a code of `tpdet.errors`."""

    request_id: str
    code: str
    message: str


def with_seed(request: Request, seed: int) -> Request:
    """The same request with the seed `seed`."""
    params = msgspec.structs.replace(request.params, seed=seed)
    return msgspec.structs.replace(request, params=params)


def room_behind(prompt_tokens: int, max_model_len: int) -> int:
    """The `max_tokens` of a request that leaves them open: the rest of the context, 1 or more."""
    return max(1, max_model_len - prompt_tokens)


def check_against_model(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Refuse an empty prompt, ids outside [0, vocab_size), and a request over the context.

    max_model_len: tokens of prompt and answer together. Raises RequestError with the field, the
    value and the limit.
    """
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    _check_ids("prompt", prompt, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("logprob_token_ids", params.logprob_token_ids, vocab_size)
    _check_ids("json_schema_after", params.json_schema_after or (), vocab_size)
    if request.pooling is not None:
        _check_ids("token_ids", request.pooling.token_ids, vocab_size)
    _check_scores(params)
    _check_drafts(request, vocab_size, max_model_len)
    _check_prediction(request.prediction, vocab_size, max_model_len)
    total = len(prompt) + request.max_tokens
    if total > max_model_len:
        raise RequestError(
            f"prompt of {len(prompt)} tokens plus max_tokens {request.max_tokens} is {total}, over "
            f"the model's context of {max_model_len}: shorten the prompt or lower max_tokens",
            "max_tokens" if len(prompt) < max_model_len else "prompt",
        )


def _check_scores(params: SamplingParams) -> None:
    if params.prompt_logprobs_last_n is not None and params.prompt_logprobs is None:
        raise RequestError(
            f"prompt_logprobs_last_n {params.prompt_logprobs_last_n} is of prompts that are "
            "scored: give prompt_logprobs, 0 for no alternatives",
            "prompt_logprobs_last_n",
        )


def _check_drafts(request: Request, vocab_size: int, max_model_len: int) -> None:
    name = "tpdet.resume" if request.resumed else "drafts"
    if len(request.drafts) > request.params.n:
        what = "resumed choices" if request.resumed else "drafts"
        raise RequestError(
            f"{len(request.drafts)} {what} for {request.params.n} choices: give each choice one",
            name,
        )
    for drafts in request.drafts:
        _check_ids(name, drafts, vocab_size)
        total = len(request.prompt_token_ids) + len(drafts)
        if total > max_model_len:
            raise RequestError(
                f"prompt of {len(request.prompt_token_ids)} tokens plus {name} of {len(drafts)} is "
                f"{total}, over the model's context of {max_model_len}: shorten the {name}",
                name,
            )


def _check_prediction(prediction: tuple[int, ...], vocab_size: int, max_model_len: int) -> None:
    _check_ids("prediction", prediction, vocab_size)
    if len(prediction) > max_model_len:
        raise RequestError(
            f"a prediction of {len(prediction)} tokens is over the model's context of "
            f"{max_model_len}: shorten it",
            "prediction",
        )


def _check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    # Thousands of ids, all of which are right as a rule: looked at together first.
    if {*map(type, ids)} <= {int} and min(ids, default=0) >= 0 and max(ids, default=0) < vocab_size:
        return
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} in {field} is outside the vocabulary [0, {vocab_size})", field
            )
