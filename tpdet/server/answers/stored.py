"""A stored answer: recorded answers with how each choice ended, and the outputs they stand for.

The outputs take the way of the engine's, through the same response, which writes the body anew.
"""

import asyncio
import logging
from collections.abc import Iterator
from itertools import zip_longest

import msgspec

from tpdet.audit.recorded import RecordedAnswer, RecordedChoice, tokens_of
from tpdet.audit.replay import (
    LEFT_OUT,
    VERSION,
    AnswerDigests,
    DigestOrigin,
    draws_noise,
    replay_digest,
)
from tpdet.control.row_messages import SampledToken
from tpdet.requests.answer.whole_answer import WholeAnswer
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.problems import internal_error
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import Request, SamplingParams, TokenOutput
from tpdet.server.front.pace import Turns
from tpdet.server.front.response_handle import Reader, ResponseHandle
from tpdet.text.outputs import DEAD_END, RequestAssembler, all_logprob_bits
from tpdet.text.tokenizer import Tokenizer

_log = logging.getLogger("tpdet.server")
_SHOWN = {name: getattr(SamplingParams(), name) for name in LEFT_OUT}


class StoredChoice(RecordedChoice, frozen=True):
    """A recorded choice and how it ended, as an answer says it."""

    finish_reason: str
    stop_reason: str | int | None = None


class PromptAnswer(RecordedAnswer, frozen=True, kw_only=True):
    """A prompt's answer, its choices with their ends."""

    outputs: tuple[StoredChoice, ...]


class StoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call, whole: a function of its request digest, byte by byte.

    `answers` has one for each prompt, as if it had been sent alone, with what is covered by its
    digest and nothing else.
    """

    request_digest: str
    replay_digest: str
    answers: tuple[PromptAnswer, ...]

    @classmethod
    def of(
        cls, whole: WholeAnswer, digests: AnswerDigests, seed: int, facts: EngineFacts
    ) -> "StoredAnswer":
        """What is stored of an answer that is complete; seed: its first prompt's."""
        names = facts.contract, facts.model_digest, VERSION, facts.logprobs_mode
        answers = []
        for request in whole.call.requests:
            params, assembler = request.params, whole.assemblers[request.request_id]
            used = seed if params.seed is None else params.seed
            tokens = [assembler.choice(index).logprobs for index in range(params.n)]
            answers.append(
                PromptAnswer(
                    contract=facts.contract,
                    weights=facts.model_digest,
                    seed=used if draws_noise(params) else 0,
                    prompt_token_ids=request.prompt_token_ids,
                    params=_covered(params),
                    outputs=tuple(_ended(assembler, index) for index in range(params.n)),
                    replay_digest=replay_digest([request], [tokens], DigestOrigin(used, *names)),
                    replay_version=VERSION,
                    logprobs_mode=facts.logprobs_mode,
                )
            )
        return cls(
            request_digest=digests.request, replay_digest=digests.replay, answers=tuple(answers)
        )

    def fits(self, call: Call, tokenizer: Tokenizer | None) -> bool:
        """Whether the call's answer ends where this one does, by this tokenizer's text too."""
        if [len(answer.outputs) for answer in self.answers] != [call.choices] * len(call.requests):
            return False
        for request, answer in zip(call.requests, self.answers, strict=True):
            if not request.params.stop:
                continue
            assembler = RequestAssembler(request, tokenizer)
            for index, choice in enumerate(answer.outputs):
                deltas = [
                    assembler.push_token(one) for one in stored_outputs(request, index, choice, 0)
                ]
                if [delta.finish_reason for delta in deltas[:-1]] != [None] * (len(deltas) - 1):
                    return False
            if not assembler.finished:
                return False
        return True


class StoredOutputs:
    """In place of the engine: gives a call the outputs of a stored answer, choice by choice in
    turn, as steps would.
    """

    def __init__(self, call: Call, stored: StoredAnswer, facts: EngineFacts, turns: Turns) -> None:
        """facts: those that the request digest names."""
        self._call, self._stored, self._facts, self._turns = call, stored, facts, turns
        self._task: asyncio.Task[None] | None = None

    def submit(
        self, requests: tuple[Request, ...], group_id: str, reader: Reader
    ) -> ResponseHandle:
        """The handle of the outputs, which follow from a task."""
        handle = ResponseHandle(self, group_id, requests, reader, self)
        handle.pending, handle.facts = False, self._facts
        first = requests[0].params.seed
        handle.accepted.set_result(self._stored.answers[0].seed if first is None else first)
        self._task = asyncio.create_task(self._deliver(handle))
        return handle

    def facts_of(self, number: int) -> EngineFacts:
        """The engine's facts under the weights of all outputs."""
        return self._facts

    def close(self, handle: ResponseHandle) -> None:
        """Nobody reads any more."""
        if self._task is not None:
            self._task.cancel()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """A stop string has ended a choice: nothing follows."""

    def token(self, output: TokenOutput, now: float) -> None:
        """No engine took time for it."""

    def finished(self, request_id: str, choice: int, reason: str, now: float) -> None:
        """As `token`."""

    async def _deliver(self, handle: ResponseHandle) -> None:
        try:
            async for _ in self._turns.slices(self._put(handle)):
                handle.flush()
        except Exception:
            _log.exception("the stored answer to %s failed", handle.group_id)
            handle.fail(internal_error())

    def _put(self, handle: ResponseHandle) -> Iterator[None]:
        number = self._facts.weights_number
        pairs = zip(self._call.requests, self._stored.answers, strict=True)
        choices = [
            stored_outputs(request, index, choice, number)
            for request, answer in pairs
            for index, choice in enumerate(answer.outputs)
        ]
        for step in zip_longest(*choices):
            for output in step:
                if output is not None:
                    handle.put(output, 0.0)
            yield None


def _ended(assembler: RequestAssembler, index: int) -> StoredChoice:
    choice = assembler.choice(index)
    assert choice.finish_reason is not None
    bits = all_logprob_bits([token.logprob for token in choice.logprobs])
    return StoredChoice(choice.token_ids, bits, choice.finish_reason, choice.stop_reason)


def _covered(params: SamplingParams) -> SamplingParams:
    """The parameters in one spelling for each request digest, without what is only shown."""
    return msgspec.structs.replace(
        params,
        **_SHOWN,
        seed=None,
        top_k=max(params.top_k, 0),
        stop_token_ids=tuple(sorted({*params.stop_token_ids})),
        logit_bias=dict(sorted(params.logit_bias.items())),
    )


def stored_outputs(
    request: Request, index: int, choice: StoredChoice, weights: int
) -> Iterator[TokenOutput]:
    """What the engine gave for a choice. Its last output has the reason that the engine saw."""
    name, params, tokens = request.request_id, request.params, tokens_of(choice)
    for token in tokens[:-1]:
        yield TokenOutput(name, index, token.token_id, token.logprob, weights=weights)
    last = tokens[-1] if tokens else SampledToken(-1, 0.0)
    reason: str | None = choice.finish_reason
    ends = (*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids))
    if reason == "stop" and isinstance(choice.stop_reason, str):
        reason = None  # the string is matched again
    yield TokenOutput(
        name,
        index,
        last.token_id,
        last.logprob,
        finish_reason=reason,
        stop_token_id=last.token_id if reason == "stop" and last.token_id in ends else None,
        dead_end=reason == "length" and choice.stop_reason == DEAD_END,
        weights=weights,
    )
