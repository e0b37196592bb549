"""From committed tokens to answers: text, stop strings, log-probabilities, finish reasons.

The engine ends a choice by tokens (end and stop ids, length). Stop strings are found here, because
only text shows them. A choice that a string ended still runs in the engine until its reader aborts
it; its later tokens are ignored. Streamed and finished answers come from the same assembler, so
the streamed text concatenates to the finished text. Where reasoning is split off, the text is the
content, and stop strings are still found in the whole. Needs no torch.
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from typing import NamedTuple

import msgspec
import numpy

from tpdet.control.row_messages import SampledToken
from tpdet.errors import RequestError
from tpdet.requests.request import (
    ABORTED,
    PromptOutput,
    Request,
    RequestFailed,
    SamplingParams,
    TokenOutput,
)
from tpdet.text.detokenizer import IncrementalDetokenizer
from tpdet.text.parsing.events import CallBegun, Event, FunctionCall, Message, text_events
from tpdet.text.parsing.parser import OutputParser
from tpdet.text.stop_strings import StopStringMatcher
from tpdet.text.tokenizer import Tokenizer

NEGATIVE_INFINITY = -9999.0  # stands for -inf: JSON has no infinity
DEAD_END = "grammar"  # the stop reason of a text after which the schema allows no token


class WeightSpan(NamedTuple):
    """Tokens [start, end) of a choice that have this `TokenOutput.weights`."""

    weights: int
    start: int
    end: int


def weights_of(number: int) -> int:
    """The number of the weights in `TokenOutput.weights`, whatever keys they read."""
    return number if number >= 0 else -1 - number


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What one committed token adds to a choice.

    `token_ids` and `logprobs` have the same length: 1, or 0 when nothing was sampled or the choice
    had ended. `text` lags behind while it could begin a stop string, or while a character is not
    complete. `offset` is where the token begins in the choice's whole text. `stop_reason` is the
    stop string or the id of `stop_token_ids` that ended the choice, or DEAD_END. `abort`: the
    reader has to abort the choice in the engine. `reasoning` is text too, and none of `text`.
    `cached_tokens`, in the first delta: the prompt's tokens that were read from the prefix cache.
    `events`, where calls of tools are among them: all that the delta says, in its order.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledToken, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    abort: bool = False
    offset: int = 0
    reasoning: str = ""
    cached_tokens: int = 0
    events: tuple[Event, ...] = ()

    @property
    def calls(self) -> bool:
        """Whether a call of a tool is among the events."""
        return any(isinstance(event, CallBegun) for event in self.events)

    @property
    def said(self) -> tuple[Event, ...]:
        """All that the delta says, in its order."""
        return self.events or text_events(self.reasoning, self.text)


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """A choice; `token_ids`, `logprobs` and `offsets` have the same length.

    They include the stop token. `finish_reason` is None while the choice runs. `offsets` are where
    the tokens begin in `text`. A token without text (a special one, or the end of a character)
    begins where the next text does; a token that a stop string cut off, at or past the end.
    `draft_tokens` of the request's drafts or prediction were verified, and
    `accepted_draft_tokens` of them were right. Where `reasoning` is split off, `text` is the
    content, and `offsets` are still those in the whole. `weight_spans` say which weights computed
    which of its tokens; most answers have one. `cached_tokens` of the
    prompt were read from the prefix cache. `calls` are of tools, and no part of `text`; the last
    one may be one in which the answer was cut.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledToken, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    offsets: tuple[int, ...] = ()
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    routed_experts: bytes = b""
    reasoning: str = ""
    weight_spans: tuple[WeightSpan, ...] = ()
    cached_tokens: int = 0
    calls: tuple[FunctionCall, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """An answer: its choices by index, and the prompt's scores if they were requested.

    `approximate`: one of its steps was not computed by the contract.
    """

    request: Request
    prompt: PromptOutput | None
    choices: tuple[ChoiceAnswer, ...]
    approximate: bool = False

    @property
    def weights(self) -> list[int]:
        """`TokenOutput.weights` of its tokens and its prompt's scores, each once."""
        spans = {span.weights for choice in self.choices for span in choice.weight_spans}
        return sorted(spans if self.prompt is None else spans | {self.prompt.weights})


class ChoiceAssembler:
    """Turns one choice's tokens into text, piece by piece, and finds its stop strings.

    Without a tokenizer there is no text, and stop strings are refused with RequestError. With a
    `splitter` the reasoning and the calls of tools are split off from the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        splitter: OutputParser | None = None,
    ) -> None:
        if tokenizer is None and params.stop:
            raise RequestError("stop strings need a tokenizer: use stop_token_ids", "stop")
        self._params = params
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, params.skip_special_tokens) if tokenizer else None
        )
        self._matcher = StopStringMatcher(params.stop, params.include_stop_str_in_output)
        self._splitter = splitter
        self._pieces: list[str] = []
        self._reasoning: list[str] = []
        self._events: dict[int, tuple[Event, ...]] = {}  # by the piece, where there are calls
        self._tokens: list[SampledToken] = []
        self._offsets: list[int] = []
        self._length = 0  # of the text so far, including text that is held back
        self.finish_reason: str | None = None  # None while it runs
        self._stop_reason: str | int | None = None
        self.draft_tokens = self.accepted_draft_tokens = self.cached_tokens = 0
        self._routed_experts = b""
        self._weights = -1  # of the latest token
        self._begins: list[tuple[int, int]] = []  # of each span: its weights, its first token

    @property
    def token_count(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    @property
    def reasoning_tokens(self) -> int:
        """Those of them that are reasoning; the marks around it are not."""
        return 0 if self._splitter is None else self._splitter.reasoning_tokens

    def push(self, output: TokenOutput) -> TextDelta:
        """Add the next committed token; tokens after the end are ignored."""
        if self.finish_reason is not None:
            return TextDelta()
        if output.draft_tokens:
            self.draft_tokens += output.draft_tokens
            self.accepted_draft_tokens += output.accepted_draft_tokens
        if output.cached_tokens:
            self.cached_tokens = output.cached_tokens
        if output.finish_reason is None and not self._params.stop:
            return self._push_plain(output)
        tokens = _tokens(output)
        if tokens and output.weights != self._weights:
            self._begin_span(output.weights)
        self._tokens.extend(tokens)
        # As in vLLM: text of the first min_tokens tokens cannot complete a stop string.
        may_stop = len(self._tokens) > self._params.min_tokens
        decoded = self._decode(output)
        offset = self._length + self._start_in(decoded, output.token_id)
        self._length += len(decoded)
        if tokens:
            self._offsets.append(offset)
        text, stop = self._matcher.push(decoded, may_stop)
        if stop is not None:
            self.finish_reason, self._stop_reason = "stop", stop
        elif output.finish_reason is not None:
            text += self._matcher.flush()
            self.finish_reason = output.finish_reason
            self._routed_experts = output.routed_experts
            if output.stop_token_id in self._params.stop_token_ids:
                self._stop_reason = output.stop_token_id
            if output.dead_end:
                self._stop_reason = DEAD_END
        reasoning = ""
        events: tuple[Event, ...] = ()
        if self._splitter is not None:
            ended = self.finish_reason is not None
            if tokens:
                self._splitter.push(output.token_id, decoded, ended)
            cut = self.finish_reason in ("length", ABORTED)
            text, reasoning, events = self._splitter.take(text, ended, cut)
            self._reasoning.append(reasoning)
            if events:
                self._events[len(self._pieces)] = events
        self._pieces.append(text)
        return TextDelta(
            text=text,
            token_ids=(output.token_id,) if tokens else (),
            logprobs=tokens,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            abort=stop is not None and output.finish_reason is None,
            offset=offset,
            reasoning=reasoning,
            cached_tokens=output.cached_tokens,
            events=events,
        )

    def _push_plain(self, output: TokenOutput) -> TextDelta:
        """`push` of a token that ends nothing, where no string can: by far the most tokens."""
        token_id = output.token_id
        token = SampledToken(token_id, output.logprob, output.top, output.rank)
        offset, text, detokenizer = self._length, "", self._detokenizer
        if detokenizer is not None:
            text = detokenizer.push(token_id)
            self._length += len(text)
            if "\ufffd" in text:
                offset += detokenizer.start_in(text, token_id)
        if output.weights != self._weights:
            self._begin_span(output.weights)
        self._tokens.append(token)
        self._offsets.append(offset)
        cached = output.cached_tokens
        splitter = self._splitter
        if splitter is None or splitter.passes(token_id, text):
            if splitter is not None:
                self._reasoning.append("")
            self._pieces.append(text)
            return TextDelta(text, (token_id,), (token,), None, None, False, offset, "", cached)
        splitter.push(token_id, text)
        text, reasoning, events = splitter.take(text)
        self._reasoning.append(reasoning)
        if events:
            self._events[len(self._pieces)] = events
        self._pieces.append(text)
        delta = TextDelta(text, (token_id,), (token,), None, None, False, offset, reasoning, cached)
        return msgspec.structs.replace(delta, events=events) if events else delta

    def answer(self, index: int) -> ChoiceAnswer:
        """The finished choice. Raises ValueError while it runs."""
        if self.finish_reason is None:
            raise ValueError(f"choice {index} has not ended: push its remaining tokens first")
        return self.so_far(index)

    def so_far(self, index: int) -> ChoiceAnswer:
        """The choice so far."""
        return ChoiceAnswer(
            index=index,
            text="".join(self._pieces),
            token_ids=tuple([token.token_id for token in self._tokens]),
            logprobs=tuple(self._tokens),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            offsets=tuple(self._offsets),
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
            routed_experts=self._routed_experts,
            reasoning="".join(self._reasoning),
            weight_spans=self.weight_spans,
            cached_tokens=self.cached_tokens,
            calls=Message.of(chain.from_iterable(self._events.values())).calls,
        )

    def said(self) -> Iterator[Event]:
        """All that the choice says so far, in its order, piece by piece."""
        pieces = zip_longest(self._reasoning, self._pieces, fillvalue="")
        for number, (reasoning, text) in enumerate(pieces):
            yield from self._events.get(number) or text_events(reasoning, text)

    @property
    def weight_spans(self) -> tuple[WeightSpan, ...]:
        """Which weights computed which of the tokens so far."""
        begins = [*self._begins, (0, len(self._tokens))]
        return tuple(
            WeightSpan(weights, start, end) for (weights, start), (_, end) in pairwise(begins)
        )

    def _begin_span(self, weights: int) -> None:
        self._weights = weights
        self._begins.append((weights, len(self._tokens)))

    def _start_in(self, text: str, token_id: int) -> int:
        return 0 if self._detokenizer is None else self._detokenizer.start_in(text, token_id)

    def _decode(self, output: TokenOutput) -> str:
        """The text this token completes; a stop token has text only if stops are included."""
        if self._detokenizer is None:
            return ""
        shown = output.stop_token_id is None or self._params.include_stop_str_in_output
        text = self._detokenizer.push(output.token_id) if shown and output.token_id >= 0 else ""
        return text if output.finish_reason is None else text + self._detokenizer.finish()


class RequestAssembler:
    """Collects the engine's outputs of one request into its answer."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        splitter: Callable[[], OutputParser] | None = None,
    ) -> None:
        """splitter: makes what splits the reasoning off from a choice."""
        self.request = request
        self.failure: RequestFailed | None = None
        self.approximate = False
        self.prompt: PromptOutput | None = None  # its scores, once they are there
        self.choices = [
            ChoiceAssembler(
                tokenizer if request.params.detokenize else None,
                request.params,
                None if splitter is None else splitter(),
            )
            for _ in range(request.params.n)
        ]
        self._running = len(self.choices)

    def push(self, output: TokenOutput | PromptOutput | RequestFailed) -> TextDelta | None:
        """Add one output; returns the delta of a token's choice, None for other outputs."""
        if not isinstance(output, TokenOutput):
            if isinstance(output, RequestFailed):
                self.failure = output
            else:
                self.prompt = output
            return None
        return self.push_token(output)

    def push_token(self, output: TokenOutput) -> TextDelta:
        """Add a token; returns the delta of its choice."""
        if output.approximate:
            self.approximate = True
        delta = self.choices[output.choice].push(output)
        if delta.finish_reason is not None:  # once a choice
            self._running -= 1
        return delta

    @property
    def finished(self) -> bool:
        """Whether the request failed or every choice ended."""
        return self.failure is not None or not self._running

    @property
    def generated_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.token_count for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        """Those of `generated_tokens` that are reasoning."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that its first choice read from the prefix cache."""
        return self.choices[0].cached_tokens

    @property
    def draft_tokens(self) -> int:
        """Tokens of the request's drafts or prediction that were verified so far."""
        return sum(choice.draft_tokens for choice in self.choices)

    @property
    def accepted_draft_tokens(self) -> int:
        """Those of `draft_tokens` that were right."""
        return sum(choice.accepted_draft_tokens for choice in self.choices)

    def choice(self, index: int) -> ChoiceAnswer:
        """One finished choice. Raises ValueError while it runs."""
        return self.choices[index].answer(index)

    def as_delta(self, index: int) -> TextDelta:
        """One finished choice as a single delta. Raises ValueError while it runs."""
        answer = self.choice(index)
        return TextDelta(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            cached_tokens=answer.cached_tokens,
            events=tuple(self.choices[index].said()),
        )

    def answer(self) -> RequestAnswer:
        """The finished answer. Raises ValueError while a choice runs or if the request failed."""
        if self.failure is not None:
            raise ValueError(f"request failed, there is no answer: {self.failure.message}")
        choices = tuple(choice.answer(index) for index, choice in enumerate(self.choices))
        return RequestAnswer(self.request, self.prompt, choices, self.approximate)

    def so_far(self) -> RequestAnswer:
        """The answer so far."""
        choices = tuple(choice.so_far(index) for index, choice in enumerate(self.choices))
        return RequestAnswer(self.request, self.prompt, choices, self.approximate)


def logprob_bits(value: float) -> str:
    """A float32's bits as 8 hex digits, most significant first: -1.0 -> "bf800000"."""
    return struct.pack(">f", value).hex()


def all_logprob_bits(values: Sequence[float]) -> tuple[str, ...]:
    """`logprob_bits` of many."""
    text = struct.pack(f">{len(values)}f", *values).hex()
    return tuple([text[begin : begin + 8] for begin in range(0, len(text), 8)])


def shortest_float32(value: float) -> float:
    """The number whose JSON is the shortest round-trip decimal of a float32; -9999.0 for -inf."""
    return NEGATIVE_INFINITY if value == -math.inf else float(str(numpy.float32(value)))


def _tokens(output: TokenOutput) -> tuple[SampledToken, ...]:
    if output.token_id < 0:  # max_tokens 0: nothing was sampled
        return ()
    return (SampledToken(output.token_id, output.logprob, output.top, output.rank),)
