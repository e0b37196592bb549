"""The body of `POST /v1/responses`: a chat by the names of OpenAI's Responses API, without state.

It becomes the body of a chat, so that everything is checked and prepared in one way.
"""

import re
from typing import Annotated, Any, NamedTuple

from pydantic import WithJsonSchema

from tpdet.requests.answer.json_pieces import json_text
from tpdet.requests.body import limits
from tpdet.requests.body.idle_fields import IDLE
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.requests.body.responses_items import Items
from tpdet.requests.body.responses_tools import ResponseTools
from tpdet.requests.body.schema import Body, ChatBody, Count, with_fields
from tpdet.requests.tools import ChatForm

Json = dict[str, Any]
_STATELESS = "answers are not stored: send the whole conversation as input"
_SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens",
    "ignore_eos", "cache_salt", "chat_template_kwargs", "structured_outputs", "prediction", "user",
    "metadata", "prompt_cache_key", "safety_identifier", "parallel_tool_calls",
    "skip_special_tokens", "return_token_ids", "tpdet",
)  # fmt: skip
"""Fields whose name and meaning are those of chats."""
_ECHOED = ("instructions", "metadata", "prompt_cache_key", "safety_identifier", "user")
_LOGPROBS = "message.output_text.logprobs"
_ANY_OBJECT = {"type": "object"}


class ReasoningFields(Body):
    """How the model reasons: `effort`, where the chat template reads it; there is no summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFields(Body):
    """The form of the answer's text."""

    idle = IDLE["response_text"]
    format: Annotated[Any, WithJsonSchema({"anyOf": [_ANY_OBJECT, {"type": "null"}]})] = None


class _ResponseFields(Body):
    """What chats do not have."""

    idle = IDLE["responses"]
    input: Annotated[
        Any,
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _ANY_OBJECT}]}
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    include: list[str] | None = None
    store: bool | None = None
    client_metadata: dict[str, Any] | None = None
    tools: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _ANY_OBJECT}, {"type": "null"}]})
    ] = None
    tool_choice: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "string"}, _ANY_OBJECT, {"type": "null"}]})
    ] = None


ResponsesBody: Any = with_fields(
    "ResponsesBody",
    _ResponseFields,
    "`POST /v1/responses`.",
    {name: ChatBody.model_fields[name] for name in _SAME},
)


class ResponsesForm(ChatForm, frozen=True, kw_only=True, tag="responses"):
    """What the answer repeats of its request, and how it names the tools that it calls.

    echo: by the name of a field, what is repeated as JSON text, which no event loop writes anew.
    names: by the name that the model sees, type, own name and namespace of a tool (empty for none).
    encrypted: reasoning is asked for as `encrypted_content` too. limited: the request has
    max_output_tokens.
    """

    echo: dict[str, str]
    names: dict[str, tuple[str, str, str]]
    encrypted: bool = False
    limited: bool = False


class AskedChat(NamedTuple):
    """The fields of a chat; the form of its answer; the items that its messages came from."""

    fields: Json
    form: ResponsesForm
    items: Items


def chat_of(body: ResponsesBody) -> AskedChat:
    """The `fitted` chat that a body asks for. Raises ApiError naming the field."""
    _check_include(body.include or [])
    tools = ResponseTools.of(body.tools, body.tool_choice)
    same = {name: value for name in _SAME if (value := _plain(getattr(body, name))) is not None}
    if (same.get("tpdet") or {}).get("resume") is not None:
        raise bad_request(f"tpdet.resume is for /v1/chat/completions: {_STATELESS}", "tpdet")
    items = Items()
    chat: Json = {
        **same,
        "messages": items.messages(body.instructions, body.input),
        "tools": tools.declared or None,
        "tool_choice": tools.choice,
        "max_tokens": body.max_output_tokens,
        "response_format": _response_format(None if body.text is None else body.text.format),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "tpdet": {**same.get("tpdet", {}), "fitted": True},
    }
    form = ResponsesForm(
        echo=_echo(body, tools),
        names={name: (tool.kind, tool.name, tool.namespace) for name, tool in tools.names.items()},
        dropped=tools.dropped,
        encrypted="reasoning.encrypted_content" in (body.include or ()),
        limited=body.max_output_tokens is not None,
    )
    fields = {name: value for name, value in chat.items() if value is not None}
    return AskedChat(fields, form, items)


def by_response_names(error: ApiError, items: Items | None = None) -> ApiError:
    """The same refusal, about the fields that the client knows.

    items: that made the messages, where the refusal may name some.
    """
    items = items or Items()

    def item_of(match: re.Match[str]) -> str:
        index, call = int(match[1]), match[2]
        if index >= len(items.places):
            return match[0]
        if call is None:
            return items.places[index]
        calls = items.calls[index]
        return calls[int(call)] if int(call) < len(calls) else match[0]

    message, param = error.message, error.param
    if param in ("messages", "prompt"):
        param = "input"
    for ours, theirs in _NAMES.items():
        message = re.sub(rf"\b{ours}\b", theirs, message)
        param = theirs if param is not None and param.partition(".")[0] == ours else param
    message = _MESSAGE.sub(item_of, message)
    param = param and _MESSAGE.sub(item_of, param)
    return error.reworded(message, param)


_MESSAGE = re.compile(r"\bmessages\[(\d{1,9})\](?:\.tool_calls\[(\d{1,9})\](?:\.function\b)?)?")
_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, Body) else value


def _check_include(include: list[str]) -> None:
    if _LOGPROBS in include:
        raise bad_request(
            f"include {_LOGPROBS!r} is not supported: use /v1/chat/completions with logprobs",
            "include",
            "not_supported",
        )


def _response_format(asked: Any) -> Json | None:
    """`response_format` of a chat, for `text.format`."""
    if not isinstance(asked, dict):
        if asked is None:
            return None
        raise bad_request("text.format must be an object with a type", "text")
    fields = {name: value for name, value in asked.items() if value is not None}
    kind = fields.pop("type", None)
    if kind != "json_schema":
        return {"type": kind, **fields}
    return {"type": kind, "json_schema": fields}


def _echo(body: ResponsesBody, tools: ResponseTools) -> dict[str, str]:
    """The fields of a response that repeat those of its request, as JSON. Raises ApiError."""
    effort = None if body.reasoning is None else body.reasoning.effort
    shown = None if body.text is None else body.text.format
    repeated = {name: getattr(body, name) for name in _ECHOED}
    repeated |= {
        "metadata": repeated["metadata"] or {},
        "max_tool_calls": body.max_tool_calls,
        "parallel_tool_calls": getattr(body, "parallel_tool_calls", None) is not False,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": shown or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": tools.shown,
    }
    written = {name: json_text(value) for name, value in repeated.items()}
    for name, text in written.items():
        # Instructions are of the prompt, which has its own bound.
        if name != "instructions" and len(text) > limits.MAX_REPEATED_CHARACTERS:
            raise bad_request(
                f"{name} is {len(text)} characters of JSON, which the answer repeats; the limit is "
                f"{limits.MAX_REPEATED_CHARACTERS}: send less",
                name,
            )
    return written
