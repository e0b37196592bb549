"""Requests of a model that is a hash, and what each is answered when it is alone.

The next token depends on every token id before it, on the seed, the choice and the position.
"""

from dataclasses import dataclass, field

import blake3
import numpy as np

from tpdet.control.row_messages import SampledToken
from tpdet.requests.request import Request, SamplingParams

VOCABULARY = 50
EOS = 7


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
