"""An answer in the form of OpenAI's Responses API: its items, and the events that make them.

The model's reasoning, text and calls are items in the order in which they come. An item's ids are
functions of the request (`shown_ids`), and no event holds anything that is drawn.
"""

import json
import time
from typing import Any, ClassVar

from tpdet.requests import shown_ids
from tpdet.requests.answer.calls import ending_of
from tpdet.requests.answer.json_pieces import Written
from tpdet.requests.body.prepare import Call
from tpdet.requests.body.problems import ApiError
from tpdet.requests.body.responses_body import ResponsesForm
from tpdet.requests.body.responses_items import sealed
from tpdet.requests.body.responses_tools import INPUT
from tpdet.requests.request import ABORTED
from tpdet.text.outputs import TextDelta, logprob_bits
from tpdet.text.parsing import json_text
from tpdet.text.parsing.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    ContentText,
    ReasoningText,
)

Json = dict[str, Any]
_STATUS = {"length": "incomplete", ABORTED: "failed"}  # by finish reason; else "completed"
_ENDED = {"code": "server_error", "message": "the answer was ended before it was complete"}


class ResponseWriter:
    """Writes the answer to one call, whose `form` is a `ResponsesForm`."""

    mark: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(self, call: Call) -> None:
        if not isinstance(call.form, ResponsesForm):
            raise ValueError("the call is not of the Responses form: prepare it so")
        self._call, self._form = call, call.form
        self._ids: shown_ids.ShownIds | None = None
        self._around: Json = {}
        self._output: list[Json] = []
        self._is_open = False  # whether the last item is
        self._call_ended = False  # whether its call is whole
        self._part: Json | None = None  # of the open item, without its text
        self._texts: list[str] = []  # of the open item
        self._events = 0
        self._cached_tokens = 0
        self._shown: dict[str, list[Any]] = {"token_ids": [], "logprob_bits": []}
        self._reason: str | None = None
        self._stop_reason: str | int | None = None
        self._counts: Json | None = None
        self._status = "in_progress"
        self._error: Json | None = None

    def begin(self, ids: shown_ids.ShownIds, around: Json) -> list[Json]:
        """The response before its first item."""
        self._ids, self._around = ids, around
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self.whole) for name in names]

    def add(self, delta: TextDelta) -> list[Json]:
        """What a token adds to the items."""
        self._cached_tokens += delta.cached_tokens
        if self._call.token_ids:
            self._shown["token_ids"] += delta.token_ids
            self._shown["logprob_bits"] += [logprob_bits(one.logprob) for one in delta.logprobs]
        if delta.finish_reason is not None:
            self._reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        events: list[Json] = []
        for event in delta.said:
            match event:
                case ReasoningText(text):
                    events += self._grown("reasoning", text)
                case ContentText(text):
                    events += self._grown("message", text)
                case CallBegun():
                    events += self._called(event)
                case CallArguments(_, text):
                    self._texts.append(text)
                case CallEnded():
                    self._call_ended = True
        return events

    def end(self, around: Json, counts: Json) -> list[Json]:
        """The end of the last item, and the whole response."""
        called = any(item["type"].endswith("_call") for item in self._output)
        reason = ending_of(self._reason, self._stop_reason, called, self._call.tools)
        self._status = _STATUS.get(reason or "", "completed")
        self._error = _ENDED if self._status == "failed" else None
        events: list[Json] = []
        if not self._output:
            events += self._opened("message")
        events += self._closed("completed" if self._status == "completed" else "incomplete")
        self._around, self._counts = around, counts
        return [*events, self._event(f"response.{self._status}", response=self.whole)]

    def fail(self, problem: ApiError) -> list[Json]:
        """An error, and the response that it ended."""
        error = json.loads(problem.body())["error"]
        named = {name: error[name] for name in ("code", "message", "param")}
        self._status = "failed"
        self._error = {"code": "server_error", "message": error["message"]}
        return [
            *self._closed("incomplete"),
            self._event("error", **named, error=error),
            self._event("response.failed", response=self.whole),
        ]

    @property
    def whole(self) -> Json:
        """The response so far."""
        call, around = self._call, self._around
        params = call.requests[0].params
        ended = self._status == "completed"
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._id(shown_ids.RESPONSE),
            "object": "response",
            "created_at": call.created,
            "completed_at": int(time.time()) if ended else None,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": cut,
            "max_output_tokens": params.max_tokens if self._form.limited else None,
            "model": call.model,
            "output": [*self._output],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "top_logprobs": 0,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "truncation": "disabled",
            "usage": self._usage(),
            **{name: Written(text) for name, text in self._form.echo.items()},
            "system_fingerprint": around.get("system_fingerprint"),
            "tpdet": around.get("tpdet"),
            **self._ids_shown(),
        }

    def _ids_shown(self) -> Json:
        """The ids and bits of the answer, and the prompt's, where they are asked for."""
        if not self._call.token_ids or self._counts is None:
            return {}
        return {**self._shown, "prompt_token_ids": [*self._call.requests[0].prompt_token_ids]}

    def _usage(self) -> Json | None:
        counts = self._counts
        if counts is None:
            return None
        details = counts.get("completion_tokens_details") or {}
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self._cached_tokens, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "total_tokens": counts["total_tokens"],
        }

    def _grown(self, kind: str, text: str) -> list[Json]:
        """The item of this kind with more text; it is the last one, or a new one."""
        events: list[Json] = []
        if not self._is_open or self._output[-1]["type"] != kind:
            events = [*self._closed("completed"), *self._opened(kind)]
        self._texts.append(text)
        return [*events, self._of_part(f"{_TEXT_EVENTS[kind]}.delta", delta=text, **_scores(kind))]

    def _opened(self, kind: str) -> list[Json]:
        """A new item of one text."""
        self._is_open, self._texts = True, []
        if kind == "message":
            item: Json = {"id": self._item_id(shown_ids.MESSAGE), "type": kind, "role": "assistant"}
            self._part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": self._item_id(shown_ids.REASONING), "type": kind, "summary": []}
            self._part = {"type": "reasoning_text", "text": ""}
        item |= {"status": "in_progress", "content": []}
        self._output.append(item)
        return [
            self._of_item("response.output_item.added", item={**item}),
            self._of_part("response.content_part.added", part={**self._part}),
        ]

    def _called(self, call: CallBegun) -> list[Json]:
        """A new item of a call."""
        assert self._ids is not None
        events, known = self._closed("completed"), self._form.names.get(call.name)
        kind, name, namespace = known or ("function", call.name, "")
        call_id = call.id or self._ids.call(0, call.index)
        self._is_open, self._call_ended, self._texts = True, False, []
        custom = kind == "custom"
        item = {
            "id": self._item_id(shown_ids.CUSTOM_CALL if custom else shown_ids.FUNCTION_CALL),
            "type": "custom_tool_call" if custom else "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": name,
            INPUT if custom else "arguments": "",
        }
        self._output.append(item | ({"namespace": namespace} if namespace else {}))
        return [*events, self._of_item("response.output_item.added", item={**self._output[-1]})]

    def _closed(self, status: str) -> list[Json]:
        """The last item at its end, if it is open."""
        if not self._is_open:
            return []
        item, said = self._output[-1], "".join(self._texts)
        self._is_open = False
        if item["type"].endswith("_call"):
            events = self._closed_call(item, said)
            item["status"] = "completed" if self._call_ended else "incomplete"
        else:
            kind, part = item["type"], {**(self._part or {}), "text": said}
            events = [
                self._of_part(f"{_TEXT_EVENTS[kind]}.done", text=said, **_scores(kind)),
                self._of_part("response.content_part.done", part=part),
            ]
            item |= {"content": [part], "status": status}
            if kind == "reasoning" and self._form.encrypted:
                item["encrypted_content"] = sealed(said)
        return [*events, self._of_item("response.output_item.done", item=item)]

    def _closed_call(self, item: Json, said: str) -> list[Json]:
        """The arguments of a call, which come at once: a parser tells whole calls."""
        name, event = "arguments", "response.function_call_arguments"
        if item["type"] == "custom_tool_call":
            name, event = INPUT, "response.custom_tool_call_input"
            said = _input_of(said, self._call_ended)
        item[name] = said
        named = {"item_id": item["id"]}
        return [
            self._of_item(f"{event}.delta", **named, delta=said),
            self._of_item(f"{event}.done", **named, **{name: said}),
        ]

    def _item_id(self, form: shown_ids.IdForm) -> str:
        """The id of the next item."""
        return self._id(form, len(self._output))

    def _id(self, form: shown_ids.IdForm, *numbers: int) -> str:
        assert self._ids is not None
        return shown_ids.shown_id(form, self._ids.digest, *numbers)

    def _of_part(self, name: str, **fields: Any) -> Json:
        item_id = self._output[-1]["id"]
        return self._of_item(name, item_id=item_id, content_index=0, **fields)

    def _of_item(self, name: str, **fields: Any) -> Json:
        return self._event(name, output_index=len(self._output) - 1, **fields)

    def _event(self, name: str, **fields: Any) -> Json:
        number, self._events = self._events, self._events + 1
        return {"type": name, "sequence_number": number, **fields}


_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def _scores(kind: str) -> Json:
    return {"logprobs": []} if kind == "message" else {}


def _input_of(arguments: str, ended: bool) -> str:
    """The text that a custom tool gets; a grammar makes its arguments an object of this one.

    ended: the call is whole; else the text so far. Half of a surrogate pair is U+FFFD.
    """
    try:
        said = json.loads(json_text.closed_object(arguments, strings=True)).get(INPUT)
    except (ValueError, AttributeError, RecursionError):
        said = None
    if not isinstance(said, str):
        return arguments if ended else ""
    return said.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
