"""The answers that callers get, shaped like vLLM's: requests, choices, log-probabilities."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, repeat
from typing import TYPE_CHECKING, Any

from tpdet.audit.pooled import PooledAssembler, numbers_of, pooled_digest
from tpdet.audit.replay import VERSION, DigestOrigin, NamedCall, answer_digests, named_call
from tpdet.checkpoint.model_config.expert_load import route_shape
from tpdet.control.row_messages import SampledToken
from tpdet.errors import IntegrityError, NumericalError, RequestError, TpdetError
from tpdet.requests.engine_facts import RAW_LOGPROBS, LogprobsMode
from tpdet.requests.request import (
    ABORTED,
    PromptOutput,
    Request,
    RequestFailed,
    SamplingParams,
)
from tpdet.text.outputs import ChoiceAnswer, RequestAnswer, all_logprob_bits, weights_of
from tpdet.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tpdet.engine import Engine


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability at its position; `float()` of it is `logprob`.

    logprob: fp32, of the model's own distribution, before bias, penalties, temperature and filters;
        of a sampled token with `logprobs_mode="processed_logprobs"`, after all of them.
    rank: its place among all ids, 1 for the likeliest; of equal ones the lowest id comes first.
    decoded_token: the token's name (docs/server.md), mostly its text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None

    def __float__(self) -> float:
        return self.logprob


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Tokens [start, end) of a choice, and which weights computed them.

    version: what the weights are called; weights: their model digest; old_keys: they read keys and
        values that other weights had computed, so the tokens cannot be computed again.
    """

    version: str
    start: int
    end: int
    weights: str
    old_keys: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice of one prompt; AsyncLLM also gives it while it is still growing.

    index: which of the `n` choices, from 0.
    text, token_ids: the generated text and its ids; the ids include the one that ended it.
    cumulative_logprob: the sum of the tokens' log-probabilities, rounded once.
    logprobs: one `{token_id: Logprob}` a position, if requested: the sampled token first, then the
        likeliest ones, best first.
    logprob_bits: the fp32 log-probabilities of the sampled tokens as hex; always there.
    finish_reason: "stop", "length" or "abort"; None while it runs.
    stop_reason: the text of `stop` or the id of `stop_token_ids` that ended it; "grammar" where
        its schema allowed no further token.
    routed_experts: a numpy array int16 [tokens - 1, layers, k], where the engine returns them: the
        ids, ascending, of the experts that each generated token chose, of every layer with experts.
        The last token was not read. None while it runs, and if it was aborted.
    weight_versions: which weights computed which of its tokens, in order; most answers have one.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    logprob_bits: tuple[str, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    routed_experts: Any = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt; AsyncLLM also gives it while it is still growing.

    request_id: the id given to AsyncLLM, or a generated one.
    prompt: its text, if it was given as text; prompt_token_ids: the ids that the model read.
    prompt_logprobs: one `{token_id: Logprob}` a token, if requested; None for the first token.
    outputs: its choices, in order.
    finished: whether all choices have ended.
    seed: the request's, or the engine's choice; with it the request gives the same bits again.
    system_fingerprint: names the contract, the weights and the architecture; None where several
        weights computed it.
    replay_digest: the digest that a server gives for the same request (docs/replay.md). None until
        the answer is finished, and for one that was aborted, that is approximate or that several
        weights computed, which cannot be replayed.
    replay_version: which version of the digest it is; None without one.
    request_digest: the request's own, which equal requests have in common; None without the other.
    logprobs_mode: what the choices' log-probabilities are of, as the engine's setting says.
    prompt_routed_experts: as `CompletionOutput.routed_experts`, of the prompt: [tokens, layers, k].
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    system_fingerprint: str | None
    replay_digest: str | None
    replay_version: int | None = None
    request_digest: str | None = None
    logprobs_mode: LogprobsMode = RAW_LOGPROBS
    prompt_routed_experts: Any = None


@dataclass(frozen=True, kw_only=True)
class PooledResult:
    """The answer to one pooled prompt: `values` are fp32 little-endian."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    values: bytes
    cached_tokens: int
    system_fingerprint: str
    digest: str

    @cached_property
    def numbers(self) -> list[float]:
        """The values as Python's numbers; made once, where they are first asked for."""
        return numbers_of(self.values)


class ResultWriter:
    """Makes results of one engine's answers; its methods may be called from any thread."""

    def __init__(self, engine: "Engine", tokenizer: Tokenizer | None) -> None:
        self._runner, self._tokenizer = engine.runner, tokenizer
        self._pooler = engine.pooler
        self._mode = engine.config.logprobs_mode
        self._versions = engine.versions
        self._fingerprints: dict[tuple[bool, str], str] = {}  # by approximate or not, and weights

    def named(self, request: Request, seed: int) -> NamedCall:
        """The request named before its answer is there, as weights of now would answer it."""
        return named_call([request], self._origin(seed, self._versions.digest))

    def write(
        self,
        request_id: str,
        prompt: str | None,
        answer: RequestAnswer,
        seed: int,
        named: NamedCall | None = None,
    ) -> RequestOutput:
        """The answer so far, as a result, with the prompt's text; named: the request, if it was."""
        request = answer.request
        ended = all(choice.finish_reason is not None for choice in answer.choices)
        aborted = any(choice.finish_reason == ABORTED for choice in answer.choices)
        weights = [self._versions.named(weights_of(number)).digest for number in answer.weights]
        weights = weights or [self._versions.digest]
        digests = None
        if ended and not aborted and not answer.approximate and len(weights) == 1:
            tokens = [[choice.logprobs for choice in answer.choices]]
            digests = answer_digests([request], tokens, self._origin(seed, weights[0]), named)
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=self._prompt(answer.prompt, request.prompt_token_ids, request.params),
            outputs=[self._choice(choice, request) for choice in answer.choices],
            finished=ended,
            seed=seed,
            system_fingerprint=self._fingerprint(answer.approximate, weights),
            request_digest=None if digests is None else digests.request,
            replay_digest=None if digests is None else digests.replay,
            replay_version=None if digests is None else VERSION,
            logprobs_mode=self._mode,
            prompt_routed_experts=self._routed(answer.choices[0], request, prompt=True),
        )

    def pooled(self, assembler: PooledAssembler) -> PooledResult:
        """The result of a pooled prompt that has ended."""
        output, request = assembler.output, assembler.request
        assert output is not None and self._pooler is not None
        weights = self._versions.named(weights_of(output.weights)).digest
        names = self._runner.contracts.strict, weights, self._pooler.digest
        return PooledResult(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            values=output.values,
            cached_tokens=output.cached_tokens,
            system_fingerprint=self._runner.fingerprint(False, weights),
            digest=pooled_digest(request, output.values, *names),
        )

    def _origin(self, seed: int, weights: str) -> DigestOrigin:
        names = self._runner.contracts.strict, weights
        return DigestOrigin(seed, *names, logprobs_mode=self._mode)

    def _routed(self, choice: ChoiceAnswer, request: Request, prompt: bool) -> Any:
        """int16 [.., layers, k]: of the prompt's tokens, or of the choice's own; or None."""
        if not choice.routed_experts:
            return None
        import numpy as np

        layers, chosen = route_shape(self._runner.model_config)
        found = np.frombuffer(choice.routed_experts, dtype=np.int16).reshape(-1, layers, chosen)
        own = len(request.prompt_token_ids)
        return found[:own] if prompt else found[own:]

    def _fingerprint(self, approximate: bool, weights: Sequence[str]) -> str | None:
        if len(weights) > 1:
            return None
        key = approximate, weights[0]
        if key not in self._fingerprints:
            self._fingerprints[key] = self._runner.fingerprint(*key)
        return self._fingerprints[key]

    def _spans(self, choice: ChoiceAnswer) -> Iterator[WeightVersionSpan]:
        for number, start, end in choice.weight_spans:
            version, digest = self._versions.named(weights_of(number))
            yield WeightVersionSpan(version, start, end, digest, number < 0)

    def _choice(self, choice: ChoiceAnswer, request: Request) -> CompletionOutput:
        params, tokens = request.params, choice.logprobs
        return CompletionOutput(
            index=choice.index,
            text=choice.text,
            token_ids=choice.token_ids,
            cumulative_logprob=math.fsum([token.logprob for token in tokens]),
            logprobs=None
            if params.logprobs is None
            else [self._position(token, params) for token in tokens],
            logprob_bits=all_logprob_bits([token.logprob for token in tokens]),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            routed_experts=self._routed(choice, request, prompt=False),
            weight_versions=tuple(self._spans(choice)),
        )

    def _prompt(
        self, prompt: PromptOutput | None, ids: Sequence[int], params: SamplingParams
    ) -> list[dict[int, Logprob] | None] | None:
        if prompt is None or params.prompt_logprobs is None:
            return None
        scored = zip(ids, prompt.logprobs, prompt.top, prompt.ranks, strict=True)
        return [
            None
            if logprob is None
            else self._position(SampledToken(token, logprob, top, rank), params)
            for token, logprob, top, rank in scored
        ]

    def _position(self, token: SampledToken, params: SamplingParams) -> dict[int, Logprob]:
        """One position's table: the token itself, then the likeliest ones, best first."""
        names = self._tokenizer.names if self._tokenizer and params.detokenize else None
        chosen, name = token.token_id, None if names is None else names.name(token.token_id)
        found = {chosen: Logprob(token.logprob, token.rank or None, name)}
        ranks = repeat(None) if params.logprob_token_ids else count(1)
        for rank, other in zip(ranks, token.top, strict=False):
            if other.token_id != chosen:
                name = None if names is None else names.name(other.token_id)
                found[other.token_id] = Logprob(other.logprob, rank, name)
        return found


def error_of(failure: RequestFailed, request_id: str) -> TpdetError:
    """The exception for the caller of a request that failed in the engine."""
    message = f"prompt {request_id}: {failure.message}"
    if failure.code == RequestError.code:
        return RequestError(message)
    kind = IntegrityError if failure.code == IntegrityError.code else NumericalError
    return kind(message)
