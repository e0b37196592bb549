"""What answers look like in JSON: choices, log-probabilities, usage, and the chunks of a stream.

A float32 is written as its shortest round-trip decimal, minus infinity as -9999.0.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpdet.outputs import ChoiceAnswer, TextDelta, logprob_bits, shortest_float32
from tpdet.request import Candidate, PromptOutput
from tpdet.sampling_row import SampledToken
from tpdet.server.prepare import Call
from tpdet.tokenizer import Tokenizer

Json = dict[str, Any]


def to_json(value: object) -> bytes:
    """Compact UTF-8 JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8")


@dataclass
class LogprobWriter:
    """Writes one choice's log-probabilities, also piece by piece: text offsets go on counting."""

    call: Call
    tokenizer: Tokenizer | None
    offset: int = field(default=0)

    def name(self, token_id: int) -> str:
        """A token as text; its number when that is wanted or there is no tokenizer."""
        if self.call.token_names or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def completion(self, tokens: Iterable[SampledToken | None], ids: Sequence[int]) -> Json:
        """The arrays of `/v1/completions`; None (a prompt's first token) has no log-probability.

        The chosen token is always among `top_logprobs`, with the very same number; if two ids
        have one text, the chosen one is kept.
        """
        found: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, token_id in zip(tokens, ids, strict=True):
            name = self.name(token_id)
            found["tokens"].append(name)
            found["text_offset"].append(self.offset)
            self.offset += len(name)
            if token is None:
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            value = shortest_float32(token.logprob)
            found["token_logprobs"].append(value)
            found["top_logprobs"].append(self._top(token, name, value))
        return found

    def chat(self, tokens: Iterable[SampledToken]) -> Json:
        """`content` of `/v1/chat/completions`."""
        content = []
        for token in tokens:
            shown = self._limited(token)
            if self.call.logprobs and all(c.token_id != token.token_id for c in shown):
                shown = (*shown, Candidate(token.token_id, token.logprob))
            entry = self._entry(token.token_id, token.logprob)
            entry["top_logprobs"] = [self._entry(c.token_id, c.logprob) for c in shown]
            content.append(entry)
        return {"content": content, "refusal": None}

    def prompt(self, prompt: PromptOutput, ids: Sequence[int], count: int) -> list[Json | None]:
        """vLLM's `prompt_logprobs`: one `{id: {logprob, rank, decoded_token}}` a position."""
        found: list[Json | None] = []
        for token in prompt_tokens(prompt, ids):
            if token is None:
                found.append(None)
                continue
            ranked = {c.token_id: (rank, c.logprob) for rank, c in enumerate(token.top[:count], 1)}
            ranked.setdefault(token.token_id, (token.rank, token.logprob))
            found.append(
                {
                    str(token_id): {
                        "logprob": shortest_float32(logprob),
                        "rank": rank,
                        "decoded_token": self.name(token_id),
                    }
                    for token_id, (rank, logprob) in ranked.items()
                }
            )
        return found

    def _limited(self, token: SampledToken) -> tuple[Candidate, ...]:
        return token.top[: self.call.logprobs or 0]

    def _top(self, token: SampledToken, name: str, value: float) -> dict[str, float]:
        found: dict[str, float] = {}
        for candidate in self._limited(token):
            text = name if candidate.token_id == token.token_id else self.name(candidate.token_id)
            found.setdefault(text, shortest_float32(candidate.logprob))
        found[name] = value
        return found

    def _entry(self, token_id: int, logprob: float) -> Json:
        name = self.name(token_id)
        return {
            "token": name,
            "logprob": shortest_float32(logprob),
            "bytes": list(name.encode("utf-8")),
        }


def prompt_tokens(prompt: PromptOutput, ids: Sequence[int]) -> list[SampledToken | None]:
    """The prompt's tokens with their log-probabilities; None where there is none."""
    return [
        None if logprob is None else SampledToken(token_id, logprob, top, rank)
        for token_id, logprob, top, rank in zip(
            ids, prompt.logprobs, prompt.top, prompt.ranks, strict=True
        )
    ]


@dataclass
class ChoiceWriter:
    """Writes one choice, whole or in pieces; `index` is its place in the answer."""

    call: Call
    tokenizer: Tokenizer | None
    index: int
    begun: bool = False

    def __post_init__(self) -> None:
        self._logprobs = LogprobWriter(self.call, self.tokenizer)
        self._prompt_index = self.index // self.call.choices
        self._prompt_ids = self.call.requests[self._prompt_index].prompt_token_ids

    def whole(self, answer: ChoiceAnswer, prompt: PromptOutput | None) -> Json:
        """The finished choice."""
        found = self._piece(answer.text, answer.logprobs, prompt)
        found |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        if self.call.prompt_logprobs is not None and self.call.kind == "completion":
            found["prompt_logprobs"] = self.prompt_logprobs(prompt)
        return found

    def prompt_logprobs(self, prompt: PromptOutput | None) -> list[Json | None] | None:
        """vLLM's array for the prompt; None when it was not asked for."""
        if prompt is None or self.call.prompt_logprobs is None:
            return None
        return self._logprobs.prompt(prompt, self._prompt_ids, self.call.prompt_logprobs)

    def piece(self, delta: TextDelta, prompt: PromptOutput | None) -> Json:
        """What a token adds, as a stream shows it."""
        found = self._piece(delta.text, delta.logprobs, prompt, stream=True)
        found["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            found["stop_reason"] = delta.stop_reason
        return found

    def _piece(
        self,
        text: str,
        tokens: tuple[SampledToken, ...],
        prompt: PromptOutput | None,
        stream: bool = False,
    ) -> Json:
        call, first = self.call, not self.begun
        self.begun = True
        ids = [token.token_id for token in tokens]
        found: Json = {"index": self.index}
        if call.kind == "chat":
            role = {"role": "assistant"} if first or not stream else {}
            found["delta" if stream else "message"] = {**role, "content": text}
            found["logprobs"] = None if call.logprobs is None else self._logprobs.chat(tokens)
        else:
            shown: list[SampledToken | None] = list(tokens)
            shown_ids = list(ids)
            if call.echo and first:
                text = call.echo_texts[self._prompt_index] + text
                if prompt is not None:
                    shown = prompt_tokens(prompt, self._prompt_ids) + shown
                    shown_ids = [*self._prompt_ids, *ids]
            found["text"] = text
            wanted = call.logprobs is not None
            found["logprobs"] = self._logprobs.completion(shown, shown_ids) if wanted else None
        if call.token_ids:
            found["token_ids"] = ids
            found["logprob_bits"] = [logprob_bits(token.logprob) for token in tokens]
            if first:
                found["prompt_token_ids"] = list(self._prompt_ids)
        return found


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
