"""JSON of answers: choices, log-probabilities, usage, and the chunks of a stream.

A float32 is written as its shortest round-trip decimal, minus infinity as -9999.0. Arrays of a
whole answer, and what repeats the prompt, are made only while they are written (`Each`).
"""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tpdet.control.row_messages import SampledToken
from tpdet.requests.answer.calls import call_piece, ending_of, whole_calls
from tpdet.requests.answer.json_pieces import Each
from tpdet.requests.answer.prompt_scores import PromptScores
from tpdet.requests.body.prepare import Call, Echo
from tpdet.requests.request import Candidate
from tpdet.requests.shown_ids import ShownIds
from tpdet.text.detokenizer import IncrementalDetokenizer
from tpdet.text.outputs import ChoiceAnswer, TextDelta, logprob_bits, shortest_float32
from tpdet.text.token_bytes import TokenPlace
from tpdet.text.token_names import id_name
from tpdet.text.tokenizer import Tokenizer

Json = dict[str, Any]
Shown = SampledToken | None  # None: a token without a log-probability, a prompt's first
_FEW = 32


@dataclass
class LogprobWriter:
    """Writes one choice's log-probabilities: those of its tokens in their order, each once.

    skip_special_tokens: the choice's text is without them.
    """

    call: Call
    tokenizer: Tokenizer | None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._place = None if self.tokenizer is None else TokenPlace(self.tokenizer.decoder_rules)

    def name(self, token_id: int) -> str:
        """A token's name, unlike all others; a number where the call asks, or without tokenizer."""
        if self.call.token_names or self.tokenizer is None:
            return id_name(token_id)
        return self.tokenizer.names.name(token_id)

    def completion(
        self, tokens: Iterable[Shown], ids: Sequence[int], offsets: Iterable[int]
    ) -> Json:
        """The arrays of `/v1/completions`; None (a prompt's first token) has no log-probability.

        The chosen token is always among `top_logprobs`, with the very same number. `tokens` are
        gone through more than once.
        """
        count = len(ids)
        return {
            "text_offset": array_of(offsets, count),
            "token_logprobs": array_of(map(_value, tokens), count),
            "tokens": array_of(map(self.name, ids), count),
            "top_logprobs": array_of(map(self._top, tokens), count),
        }

    def chat(self, tokens: Sequence[SampledToken]) -> Json:
        """`content` of `/v1/chat/completions`; the chosen token stands beside its alternatives.

        The `bytes` of a choice's tokens, without those that its text lacks, make its text.
        """
        return {"content": array_of(map(self._chat_entry, tokens), len(tokens)), "refusal": None}

    def prompt(self, tokens: Iterable[Shown], count: int) -> Each:
        """vLLM's `prompt_logprobs`: one `{id: {logprob, rank, decoded_token}}` a position."""
        return Each(None if token is None else self._ranked(token, count) for token in tokens)

    def prompt_offsets(self, ids: Sequence[int], echo: Echo) -> Iterator[int]:
        """Where each of a prompt's tokens begins in the text that `echo` shows of it."""
        yield from [0] * echo.hidden
        offset, last = 0, len(echo.text)
        detokenizer = (
            None
            if self.tokenizer is None
            else IncrementalDetokenizer(self.tokenizer, skip_special_tokens=False)
        )
        for token_id in ids[echo.hidden :]:
            text = "" if detokenizer is None else detokenizer.push(token_id)
            start = 0 if detokenizer is None else detokenizer.start_in(text, token_id)
            yield min(offset + start, last)
            offset += len(text)

    def pass_over(self, tokens: Iterable[SampledToken]) -> None:
        """Leave out the next tokens of the choice: its reader has them."""
        for token in tokens:
            self._pass(token.token_id)

    def _chat_entry(self, token: SampledToken) -> Json:
        entry = self._entry(token.token_id, token.logprob)
        likeliest = self._limited(token)
        entry["top_logprobs"] = [self._entry(c.token_id, c.logprob) for c in likeliest]
        self._pass(token.token_id)
        return entry

    def _pass(self, token_id: int) -> None:
        spelling = self._spelling(token_id)
        if self._place is not None and spelling is not None:
            self._place.take(spelling)

    def _spelling(self, token_id: int) -> str | None:
        """The token, if the text has it and its place matters."""
        if self.tokenizer is None or self._place is None or self._place.settled:
            return None
        return self.tokenizer.token(token_id, self.skip_special_tokens)

    def _bytes(self, token_id: int) -> list[int] | None:
        """The bytes that the token adds to the text here; of one that is not shown, its own."""
        spelling = self._spelling(token_id)
        if self._place is not None and spelling is not None:
            return list(self._place.bytes_here(spelling))
        data = None if self.tokenizer is None else self.tokenizer.names.bytes(token_id)
        return None if data is None else list(data)

    def _ranked(self, token: SampledToken, count: int) -> Json:
        tops, named = enumerate(token.top[:count], 1), self.call.given_ids
        ranked = {c.token_id: (None if named else rank, c.logprob) for rank, c in tops}
        if named:
            ranked[token.token_id] = (token.rank, token.logprob)
        ranked.setdefault(token.token_id, (token.rank, token.logprob))
        return {
            str(token_id): {
                "logprob": shortest_float32(logprob),
                "rank": rank,
                "decoded_token": self.name(token_id),
            }
            for token_id, (rank, logprob) in ranked.items()
        }

    def _limited(self, token: SampledToken) -> tuple[Candidate, ...]:
        return token.top[: self.call.logprobs or 0]

    def _top(self, token: Shown) -> dict[str, float] | None:
        if token is None:
            return None
        found = {self.name(c.token_id): shortest_float32(c.logprob) for c in self._limited(token)}
        found[self.name(token.token_id)] = shortest_float32(token.logprob)
        return found

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self.name(token_id),
            "logprob": shortest_float32(logprob),
            "bytes": self._bytes(token_id),
        }


@dataclass(frozen=True)
class _ScoredPrompt:
    """A prompt's tokens and the generated ones; may be iterated more than once."""

    ids: Sequence[int]
    scores: PromptScores
    behind: Sequence[SampledToken] = ()

    def __iter__(self) -> Iterator[Shown]:
        yield from self.scores.tokens(self.ids)
        yield from self.behind


def array_of(elements: Iterable[object], count: int) -> list[object] | Each:
    """A few elements at once, many as they are written."""
    return list(elements) if count <= _FEW else Each(elements)


def _value(token: Shown) -> float | None:
    return None if token is None else shortest_float32(token.logprob)


@dataclass
class ChoiceWriter:
    """Writes one choice, whole or in pieces; `index` is its place in the answer.

    `reasoning`: messages have the fields for it. `weight_version`: what the weights are called.
    `ids`: of calls of tools, where there may be some.
    """

    call: Call
    tokenizer: Tokenizer | None
    index: int
    begun: bool = False
    reasoning: bool = False
    weight_version: str = ""
    ids: ShownIds | None = None

    def __post_init__(self) -> None:
        self._called = False  # so far, in a stream
        self._prompt_index = self.index // self.call.choices
        request = self.call.requests[self._prompt_index]
        self._prompt_ids = request.prompt_token_ids
        skip = request.params.skip_special_tokens
        self._logprobs = LogprobWriter(self.call, self.tokenizer, skip)

    def whole(
        self, answer: ChoiceAnswer, prompt: PromptScores | None, versions: list[Json] | None = None
    ) -> Json:
        """The finished choice; with its `weight_versions`, where they are to be shown."""
        found = self._piece(answer, answer.logprobs, answer.offsets, prompt)
        reason, stop, use = answer.finish_reason, answer.stop_reason, self.call.tools
        ending = ending_of(reason, stop, bool(answer.calls), use)
        found |= {"finish_reason": ending, "stop_reason": stop}
        if self.call.prompt_logprobs is not None and self.call.kind == "completion":
            found["prompt_logprobs"] = self.prompt_logprobs(prompt)
        if answer.routed_experts:
            found["routed_experts"] = b64encode(answer.routed_experts).decode("ascii")
        return found if versions is None else found | {"weight_versions": versions}

    def prompt_logprobs(self, prompt: PromptScores | None) -> Each | None:
        """vLLM's array for the prompt; None when it was not asked for."""
        if prompt is None or self.call.prompt_logprobs is None:
            return None
        tokens = _ScoredPrompt(self._prompt_ids, prompt)
        return self._logprobs.prompt(tokens, self.call.prompt_logprobs)

    def pass_over(self, delta: TextDelta) -> None:
        """Leave out what a token adds to a stream: its reader has it."""
        self._called = self._called or delta.calls
        self._logprobs.pass_over(delta.logprobs)

    def piece(
        self, delta: TextDelta, prompt: PromptScores | None, versions: list[Json] | None = None
    ) -> Json:
        """The text and scores that a token adds to a stream; only the first piece may be large.

        versions: of the last piece, where they are to be shown.
        """
        offsets = (delta.offset,) * len(delta.logprobs)
        found = self._piece(delta, delta.logprobs, offsets, prompt, stream=True)
        self._called = self._called or delta.calls
        reason, stop, use = delta.finish_reason, delta.stop_reason, self.call.tools
        found["finish_reason"] = ending_of(reason, stop, self._called, use)
        if delta.finish_reason is not None:
            found["stop_reason"] = delta.stop_reason
        return found if versions is None else found | {"weight_versions": versions}

    def event(self, around: Json, piece: Json, first: bool) -> Json:
        """The content of an event with a piece; first: the choice's. `around`: its other fields."""
        return {**around, "choices": [piece]}

    def _piece(
        self,
        part: ChoiceAnswer | TextDelta,
        tokens: tuple[SampledToken, ...],
        offsets: tuple[int, ...],
        prompt: PromptScores | None,
        stream: bool = False,
    ) -> Json:
        call, first, text = self.call, not self.begun, part.text
        self.begun = True
        found: Json = {"index": self.index}
        if call.kind == "chat":
            role = {"role": "assistant"} if first or not stream else {}
            found["delta" if stream else "message"] = role | self._message(part, stream)
            found["logprobs"] = None if call.logprobs is None else self._logprobs.chat(tokens)
        else:
            shown: Iterable[Shown] = tokens
            ids = [token.token_id for token in tokens]
            places: Iterable[int] = offsets
            if call.echo:
                echo = call.echoes[self._prompt_index]
                places = [len(echo.text) + offset for offset in offsets]
                text = echo.text + text if first else text
                if first and prompt is not None:
                    shown = _ScoredPrompt(self._prompt_ids, prompt, tokens)
                    ids = [*self._prompt_ids, *ids]
                    before = self._logprobs.prompt_offsets(self._prompt_ids, echo)
                    places = chain(before, places)
            found["text"] = text
            scored = call.logprobs is not None
            found["logprobs"] = self._logprobs.completion(shown, ids, places) if scored else None
        if call.token_ids:
            found["token_ids"] = [token.token_id for token in tokens]
            found["logprob_bits"] = [logprob_bits(token.logprob) for token in tokens]
            if first:
                found["prompt_token_ids"] = self._prompt_ids
        return found

    def _message(self, part: ChoiceAnswer | TextDelta, stream: bool) -> Json:
        """The texts of a message or a delta: reasoning under vLLM's name and under DeepSeek's."""
        if self.ids is not None and isinstance(part, TextDelta):
            pieces = [call_piece(event, self.ids, self.index) for event in part.events]
            if calls := [piece for piece in pieces if piece is not None]:
                return {"tool_calls": calls}
            if part.finish_reason and not part.text and not part.reasoning:
                return {}
        said = dict.fromkeys(("reasoning", "reasoning_content"), part.reasoning or None)
        if stream and part.reasoning:
            return said | ({"content": part.text} if part.text else {})
        if stream:
            return {"content": part.text}
        message = {"content": part.text, "refusal": None} | (said if self.reasoning else {})
        if self.ids is None or not isinstance(part, ChoiceAnswer) or not part.calls:
            return message
        calls = whole_calls(part.calls, self.ids, self.index)
        return message | {"content": part.text or None, "tool_calls": calls}


def envelope(call: Call, seed: int, fingerprint: str | None, stream: bool) -> Json:
    """The fields around the choices; fingerprint: None where several weights computed them."""
    if call.kind == "sglang":
        return {"system_fingerprint": fingerprint, "tpdet": call.seeds(seed)}
    if call.kind == "tokens":
        named = {"request_id": call.answer_id, "output_mode": "tokens"}
        more = {} if stream else {"model": call.model, "created": call.created}
        return {**named, **more, "system_fingerprint": fingerprint, "tpdet": call.seeds(seed)}
    names = {"completion": "text_completion", "chat": "chat.completion"}
    name = names[call.kind] + (".chunk" if stream and call.kind == "chat" else "")
    return {
        "id": call.group_id,
        "object": name,
        "created": call.created,
        "model": call.model,
        "system_fingerprint": fingerprint,
        "tpdet": call.seeds(seed),
    }


def usage(call: Call, completion_tokens: int) -> Json:
    """Token counts; each prompt counts once, whatever `n` is."""
    prompt = sum(len(request.prompt_token_ids) for request in call.requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
    }
