"""JSON of SGLang's answers (`/generate`): an object for each choice, with its facts in `meta_info`.

A stream's event holds everything that its choice has so far, as SGLang's events do.
"""

import math
from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat

import numpy as np

from tpdet.control.row_messages import SampledToken
from tpdet.requests.answer.choices import ChoiceWriter, Json, array_of
from tpdet.requests.answer.json_pieces import Each
from tpdet.requests.answer.prompt_scores import PromptScores
from tpdet.requests.body.sglang_body import SglangForm
from tpdet.text.outputs import ChoiceAnswer, TextDelta, shortest_float32

Entry = list[object]  # log-probability, token id, text or None


@dataclass
class SglangChoiceWriter(ChoiceWriter):
    """Writes one choice; what a stream has shown of it is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.call.sglang is None:
            raise ValueError("the call is not of SGLang's form: prepare it by Preparer.sglang")
        self._form: SglangForm = self.call.sglang
        self._texts: list[str] = []
        self._tokens: list[SampledToken] = []
        self._cached_tokens = 0

    def whole(
        self, answer: ChoiceAnswer, prompt: PromptScores | None, versions: list[Json] | None = None
    ) -> Json:
        """The finished choice, without what the receipt says."""
        self._texts, self._tokens = [answer.text], list(answer.logprobs)
        self._cached_tokens = answer.cached_tokens
        reason = self._finish_reason(answer.finish_reason, answer.stop_reason)
        content = self._content(reason, prompt, versions)
        if self._form.experts:
            ids = np.frombuffer(answer.routed_experts, dtype=np.int16).astype(np.int32)
            skipped = self.call.experts_start * math.prod(self.call.experts_shape)
            content["meta_info"]["routed_experts"] = b64encode(ids[skipped:].tobytes()).decode(
                "ascii"
            )
        return content

    def piece(
        self, delta: TextDelta, prompt: PromptScores | None, versions: list[Json] | None = None
    ) -> Json:
        """The choice up to a token that a stream shows."""
        self.begun = True
        self._texts.append(delta.text)
        self._tokens += delta.logprobs
        self._cached_tokens += delta.cached_tokens
        reason = self._finish_reason(delta.finish_reason, delta.stop_reason)
        return self._content(reason, prompt, versions)

    def pass_over(self, delta: TextDelta) -> None:
        """Keep what a token adds, though its reader has it: later events hold it too."""
        self.piece(delta, None)

    def event(self, around: Json, piece: Json, first: bool) -> Json:
        """The content of an event; of several choices each names its index."""
        content = self.with_receipt(piece, around["tpdet"], around["system_fingerprint"])
        return content if self._form.single else content | {"index": self.index}

    @staticmethod
    def with_receipt(content: Json, receipt: Json, fingerprint: str | None) -> Json:
        """A choice with what computed it."""
        own = {"system_fingerprint": fingerprint, **receipt}
        return {**content, "meta_info": {**content["meta_info"], "tpdet": own}}

    def _content(
        self, reason: Json | None, prompt: PromptScores | None, versions: list[Json] | None
    ) -> Json:
        count, asked, choices = len(self._tokens), self.call.logprobs, self.call.choices
        name = self._form.names[self._prompt_index]
        meta: Json = {
            "id": name if choices == 1 else f"{name}_{self.index % choices}",
            "finish_reason": reason,
            "prompt_tokens": len(self._prompt_ids),
            "weight_version": versions[-1]["version"] if versions else self.weight_version,
        }
        if asked is not None:
            meta["input_token_logprobs"] = self._inputs(map(self._scored, self._of_prompt(prompt)))
            meta["output_token_logprobs"] = array_of(map(self._scored, self._tokens), count)
            meta["output_token_logprobs_length"] = count
        if asked:
            kind = "token_ids_logprobs" if self.call.given_ids else "top_logprobs"
            meta[f"input_{kind}"] = self._inputs(map(self._top, self._of_prompt(prompt)))
            meta[f"output_{kind}"] = array_of(map(self._top, self._tokens), count)
        meta |= {
            "reasoning_tokens": 0,
            "completion_tokens": count,
            "cached_tokens": self._cached_tokens,
        }
        if versions is not None:
            meta["weight_versions"] = versions
        content: Json = {} if self.tokenizer is None else {"text": "".join(self._texts)}
        content |= {"output_ids": [token.token_id for token in self._tokens], "meta_info": meta}
        return content | ({"prompt_token_ids": self._prompt_ids} if self._form.prompt_ids else {})

    def _inputs(self, entries: Iterable[object]) -> list[object] | Each:
        return [] if self._form.start is None else Each(entries)

    def _of_prompt(self, prompt: PromptScores | None) -> Iterator[SampledToken | int]:
        """The prompt's tokens from the first that is asked for, which is an id without a score."""
        if self._form.start is None:
            return
        ids = self._prompt_ids
        scores = repeat(None, len(ids)) if prompt is None else prompt.tokens(ids)
        tokens = zip(ids, scores, strict=True)
        for index, (token_id, token) in enumerate(islice(tokens, self._form.start, None)):
            yield token_id if token is None or index == 0 else token

    def _scored(self, token: SampledToken | int) -> Entry:
        if isinstance(token, int):
            return self._entry(token, None)
        return self._entry(token.token_id, token.logprob)

    def _top(self, token: SampledToken | int) -> list[Entry] | None:
        if isinstance(token, int):
            return None
        tops = token.top[: self.call.logprobs]
        return [self._entry(other.token_id, other.logprob) for other in tops]

    def _entry(self, token_id: int, logprob: float | None) -> Entry:
        value = None if logprob is None else shortest_float32(logprob)
        if not self._form.texts or self.tokenizer is None:
            return [value, token_id, None]
        return [value, token_id, self.tokenizer.decode([token_id], skip_special_tokens=False)]

    def _finish_reason(self, reason: str | None, stop_reason: str | int | None) -> Json | None:
        if reason is None:
            return None
        if reason == "length":
            limit = self.call.requests[self._prompt_index].params.max_tokens
            return {"type": "length", "length": limit}
        if reason == "stop":
            matched = self._tokens[-1].token_id if stop_reason is None else stop_reason
            return {"type": "stop", "matched": matched}
        return {"type": reason, "message": "Aborted", "status_code": None, "err_type": None}
