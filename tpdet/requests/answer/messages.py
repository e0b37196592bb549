"""Answers of Anthropic's Messages API: the events of a stream, and the message they add up to.

A choice's texts, reasoning and calls are its content blocks, in the order in which the model said
them. What is no function of the request, the count of cached tokens, stands in `usage` alone.
"""

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from tpdet.requests.answer.json_pieces import Written, to_json
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.problems import ApiError
from tpdet.requests.request import ABORTED
from tpdet.requests.routes import MESSAGES, TEI_PATHS
from tpdet.requests.shown_ids import FAMILY_CALLS, MESSAGE, SIGNATURE, TOOL_USE, ShownIds, shown_id
from tpdet.text.outputs import TextDelta, logprob_bits
from tpdet.text.parsing import json_text
from tpdet.text.parsing.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    ContentText,
    Event,
    ReasoningText,
)

Json = dict[str, Any]
_REASONS = {"length": "max_tokens", ABORTED: "pause_turn"}
_PIECES = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
"""The field of a delta that holds its text, by the delta's type."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The types of errors, by their status; others of 500 and above are of type api_error."""


class MessageWriter:
    """Writes the one choice of a call as events; `whole` is the message that they add up to."""

    mark: ClassVar[bytes] = b""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._around: Json = {}
        self._message: Json = {}
        self._blocks: list[Json] = []
        self._pieces: list[str] = []  # of the open block's text
        self._open = ""  # its type
        self._called = False
        self._ending: Json = {"stop_reason": None, "stop_sequence": None}
        self._cached_tokens = 0
        self._shown: dict[str, list[Any]] = {"token_ids": [], "logprob_bits": []}

    def begin(self, ids: ShownIds, around: Json) -> list[Json]:
        """Nothing: a message's start counts the cached tokens, which the first token tells."""
        self._ids, self._around = ids, around
        return []

    def add(self, delta: TextDelta) -> list[Json]:
        """The events of what a token adds."""
        events: list[Json] = []
        if not self._message:
            self._cached_tokens = delta.cached_tokens
            self._message = self._start()
            started = {**self._message, "content": [], "usage": {**self._message["usage"]}}
            events += [{"type": "message_start", "message": started}, {"type": "ping"}]
        for event in delta.said:
            events += self._say(event)
        if self._call.token_ids:
            self._shown["token_ids"] += delta.token_ids
            self._shown["logprob_bits"] += [logprob_bits(one.logprob) for one in delta.logprobs]
        if delta.finish_reason is not None:
            self._ending = self._ended(delta.finish_reason, delta.stop_reason)
        return events

    def end(self, around: Json, counts: Json) -> list[Json]:
        """The events of the end; around: with the receipt, counts: the usage of a chat."""
        events = [*self._close()]
        details = counts.get("completion_tokens_details", {})
        thinking = details.get("reasoning_tokens")
        usage = self._usage(counts["completion_tokens"])
        usage["output_tokens_details"] = None if thinking is None else {"thinking_tokens": thinking}
        own: Json = {
            "tpdet": {"system_fingerprint": around["system_fingerprint"], **around["tpdet"]}
        }
        if self._call.token_ids:
            prompt = [*self._call.requests[0].prompt_token_ids]
            own = {**own, **self._shown, "prompt_token_ids": prompt}
        ending = {**self._ending, "stop_details": None, "container": None}
        self._message |= {**ending, "content": self._blocks, "usage": usage, **own}
        counted = {name: count for name, count in usage.items() if name in _COUNTED}
        events.append({"type": "message_delta", "delta": ending, "usage": counted, **own})
        return [*events, {"type": "message_stop"}]

    def fail(self, problem: ApiError) -> list[Json]:
        """The event of an error behind the first byte."""
        return [error_of(problem, self._call.group_id.partition("-")[2])]

    @property
    def whole(self) -> Json:
        """The message, once it has ended."""
        return self._message

    def _start(self) -> Json:
        """The message before its first token."""
        return {
            "id": shown_id(MESSAGE, self._ids.digest),
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": self._usage(0),
            "tpdet": self._around["tpdet"],
        }

    def _usage(self, output_tokens: int) -> Json:
        prompt = len(self._call.requests[0].prompt_token_ids)
        return {
            "input_tokens": prompt - self._cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._cached_tokens,
            "output_tokens": output_tokens,
            "output_tokens_details": None,
            "cache_creation": None,
            "server_tool_use": None,
            "service_tier": None,
            "inference_geo": None,
        }

    def _say(self, event: Event) -> Iterator[Json]:
        match event:
            case ReasoningText(text):
                if self._open != "thinking":
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                yield self._piece({"type": "thinking_delta", "thinking": text})
            case ContentText(text):
                if self._open != "text":
                    yield from self._begin({"type": "text", "text": "", "citations": None})
                yield self._piece({"type": "text_delta", "text": text})
            case CallBegun(index, name, written):
                self._called = True
                form = FAMILY_CALLS.get(self._ids.family, TOOL_USE)
                call_id = written or shown_id(form, self._ids.digest, 0, index)
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._begin({**block, "caller": {"type": "direct"}})
            case CallArguments(_, text):
                yield self._piece({"type": "input_json_delta", "partial_json": text})
            case CallEnded():
                yield from self._close()

    def _begin(self, block: Json) -> Iterator[Json]:
        """Open a block behind the others."""
        yield from self._close()
        self._open = block["type"]
        self._blocks.append({**block})
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _piece(self, delta: Json) -> Json:
        self._pieces.append(delta[_PIECES[delta["type"]]])
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[Json]:
        """End the open block, if there is one; reasoning is signed, a call that was cut closed."""
        if not self._open:
            return
        block, index = self._blocks[-1], len(self._blocks) - 1
        text, kind = "".join(self._pieces), self._open
        self._pieces, self._open = [], ""
        if kind == "tool_use":
            block["input"] = Written(json_text.closed_object(text))
        else:
            block[kind] = text
        if kind == "thinking":
            block["signature"] = signature = shown_id(SIGNATURE, self._ids.digest, 0, index)
            signed = {"type": "signature_delta", "signature": signature}
            yield {"type": "content_block_delta", "index": index, "delta": signed}
        yield {"type": "content_block_stop", "index": index}

    def _ended(self, reason: str, stop: str | int | None) -> Json:
        """How the message ended, in Anthropic's words."""
        if reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        by_itself = "tool_use" if self._called else "end_turn"
        return {"stop_reason": _REASONS.get(reason, by_itself), "stop_sequence": None}


_COUNTED = frozenset({
    "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens",
    "output_tokens_details", "server_tool_use",
})  # fmt: skip
"""What the usage of a stream's end has."""

_FEATURES = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
"""What a refusal tells a client that can go on without a field: anthropic's tool runner does."""


def is_of_messages(path: str) -> bool:
    """Whether a path's errors have Anthropic's form."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def problem_body(problem: ApiError, path: str, request_id: str) -> bytes:
    """The JSON of an error, in the form of the API that a path is of."""
    if is_of_messages(path):
        return to_json(error_of(problem, request_id))
    return problem.tei_body() if problem.tei or path in TEI_PATHS else problem.body()


def error_of(problem: ApiError, request_id: str) -> Json:
    """An error in Anthropic's form. What was wrong stands in its message, as in any other."""
    shown = json.loads(problem.body())["error"]
    kind = _TYPES.get(problem.status)
    if kind is None:
        kind = "api_error" if problem.status >= 500 else "invalid_request_error"
    error = {"type": kind, "message": shown["message"]}
    if shown["code"] == "not_supported" and shown["param"] in _FEATURES:
        error["details"] = _FEATURES[shown["param"]]
    return {"type": "error", "error": error, "request_id": request_id}
