"""JSON of answers: choices, log-probabilities, usage, and the chunks of a stream.

A float32 is written as its shortest round-trip decimal, minus infinity as -9999.0. Arrays of a
whole answer, and what repeats the prompt, are made only while they are written (`Each`).
"""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tpdet.control.row_messages import SampledToken
from tpdet.request import Candidate
from tpdet.server.body.prepare import Call, Echo
from tpdet.server.wire.json_pieces import Each
from tpdet.server.wire.prompt_scores import PromptScores
from tpdet.text.detokenizer import IncrementalDetokenizer
from tpdet.text.outputs import ChoiceAnswer, TextDelta, logprob_bits, shortest_float32
from tpdet.text.tokenizer import Tokenizer

Json = dict[str, Any]
Shown = SampledToken | None  # None: a token without a log-probability, a prompt's first
_FEW = 32


@dataclass
class LogprobWriter:
    """Writes one choice's log-probabilities; `names` keeps tokens' texts for a whole call."""

    call: Call
    tokenizer: Tokenizer | None
    names: dict[int, str] = field(default_factory=dict)

    def name(self, token_id: int) -> str:
        """A token as text; its number when that is wanted or there is no tokenizer."""
        found = self.names.get(token_id)
        if found is None:
            if self.call.token_names or self.tokenizer is None:
                found = f"token_id:{token_id}"
            else:
                found = self.tokenizer.token_text(token_id)
            self.names[token_id] = found
        return found

    def completion(
        self, tokens: Iterable[Shown], ids: Sequence[int], offsets: Iterable[int]
    ) -> Json:
        """The arrays of `/v1/completions`; None (a prompt's first token) has no log-probability.

        The chosen token is always among `top_logprobs`, with the very same number; if two ids
        have one text, the chosen one is kept. `tokens` are gone through more than once.
        """
        count = len(ids)
        return {
            "text_offset": _array(offsets, count),
            "token_logprobs": _array(map(_value, tokens), count),
            "tokens": _array(map(self.name, ids), count),
            "top_logprobs": _array(map(self._top, tokens), count),
        }

    def chat(self, tokens: Sequence[SampledToken]) -> Json:
        """`content` of `/v1/chat/completions`; the chosen token stands beside its alternatives."""
        return {"content": _array(map(self._chat_entry, tokens), len(tokens)), "refusal": None}

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

    def _chat_entry(self, token: SampledToken) -> Json:
        entry = self._entry(token.token_id, token.logprob)
        likeliest = self._limited(token)
        entry["top_logprobs"] = [self._entry(c.token_id, c.logprob) for c in likeliest]
        return entry

    def _ranked(self, token: SampledToken, count: int) -> Json:
        ranked = {c.token_id: (rank, c.logprob) for rank, c in enumerate(token.top[:count], 1)}
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
        name, found = self.name(token.token_id), dict[str, float]()
        for candidate in self._limited(token):
            text = name if candidate.token_id == token.token_id else self.name(candidate.token_id)
            found.setdefault(text, shortest_float32(candidate.logprob))
        found[name] = shortest_float32(token.logprob)
        return found

    def _entry(self, token_id: int, logprob: float) -> Json:
        name = self.name(token_id)
        return {
            "token": name,
            "logprob": shortest_float32(logprob),
            "bytes": list(name.encode("utf-8")),
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


def _array(elements: Iterable[object], count: int) -> list[object] | Each:
    """A few elements at once, many as they are written."""
    return list(elements) if count <= _FEW else Each(elements)


def _value(token: Shown) -> float | None:
    return None if token is None else shortest_float32(token.logprob)


@dataclass
class ChoiceWriter:
    """Writes one choice, whole or in pieces; `index` is its place in the answer.

    `reasoning`: messages have the fields for it.
    """

    call: Call
    tokenizer: Tokenizer | None
    index: int
    names: dict[int, str] = field(default_factory=dict)
    begun: bool = False
    reasoning: bool = False

    def __post_init__(self) -> None:
        self._logprobs = LogprobWriter(self.call, self.tokenizer, names=self.names)
        self._prompt_index = self.index // self.call.choices
        self._prompt_ids = self.call.requests[self._prompt_index].prompt_token_ids

    def whole(self, answer: ChoiceAnswer, prompt: PromptScores | None) -> Json:
        """The finished choice."""
        found = self._piece(answer, answer.logprobs, answer.offsets, prompt)
        found |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        if self.call.prompt_logprobs is not None and self.call.kind == "completion":
            found["prompt_logprobs"] = self.prompt_logprobs(prompt)
        if answer.routed_experts:
            found["routed_experts"] = b64encode(answer.routed_experts).decode("ascii")
        return found

    def prompt_logprobs(self, prompt: PromptScores | None) -> Each | None:
        """vLLM's array for the prompt; None when it was not asked for."""
        if prompt is None or self.call.prompt_logprobs is None:
            return None
        tokens = _ScoredPrompt(self._prompt_ids, prompt)
        return self._logprobs.prompt(tokens, self.call.prompt_logprobs)

    def piece(self, delta: TextDelta, prompt: PromptScores | None) -> Json:
        """The text and scores that a token adds to a stream; only the first piece may be large."""
        offsets = (delta.offset,) * len(delta.logprobs)
        found = self._piece(delta, delta.logprobs, offsets, prompt, stream=True)
        found["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            found["stop_reason"] = delta.stop_reason
        return found

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
            wanted = call.logprobs is not None
            found["logprobs"] = self._logprobs.completion(shown, ids, places) if wanted else None
        if call.token_ids:
            found["token_ids"] = [token.token_id for token in tokens]
            found["logprob_bits"] = [logprob_bits(token.logprob) for token in tokens]
            if first:
                found["prompt_token_ids"] = self._prompt_ids
        return found

    def _message(self, part: ChoiceAnswer | TextDelta, stream: bool) -> Json:
        """The texts of a message or a delta: reasoning under vLLM's name and under DeepSeek's."""
        said = dict.fromkeys(("reasoning", "reasoning_content"), part.reasoning or None)
        if stream and part.reasoning:
            return said | ({"content": part.text} if part.text else {})
        return {"content": part.text} | (said if self.reasoning and not stream else {})


def envelope(call: Call, seed: int, fingerprint: str, stream: bool) -> Json:
    """The fields around the choices."""
    names = {"completion": "text_completion", "chat": "chat.completion"}
    name = names[call.kind] + (".chunk" if stream and call.kind == "chat" else "")
    return {
        "id": call.group_id,
        "object": name,
        "created": call.created,
        "model": call.model,
        "system_fingerprint": fingerprint,
        "tpdet": {"seed": seed},
    }


def usage(call: Call, completion_tokens: int) -> Json:
    """Token counts; each prompt counts once, whatever `n` is."""
    prompt = sum(len(request.prompt_token_ids) for request in call.requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
    }


def prediction_details(verified: int, accepted: int) -> dict[str, int]:
    """OpenAI's counts of a prediction's tokens; those that nobody came to verify are in none."""
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": verified - accepted,
    }
