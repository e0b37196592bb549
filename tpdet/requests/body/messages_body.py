"""The body of `POST /v1/messages`: a chat by the names of Anthropic's Messages API.

It becomes the body of a chat, so that everything is checked and prepared in one way.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from tpdet.requests.body.idle_fields import IDLE
from tpdet.requests.body.messages_blocks import Conversation
from tpdet.requests.body.parse import parse_part
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.requests.body.schema import Body, ChatBody, Count, with_fields
from tpdet.requests.routes import Route, path_of
from tpdet.requests.tools import ChatForm, dropped_names, header_name

Json = dict[str, Any]
_OF_PROMPT = ("model", "metadata", "chat_template_kwargs")
_SAME = (
    *_OF_PROMPT, "stream", "temperature", "top_p", "top_k", "seed", "cache_salt", "prediction",
    "return_token_ids", "tpdet",
)  # fmt: skip
"""Fields whose name and meaning are those of chats."""
_CHOICES = '{"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": ...}'
_SWITCHES = ("enable_thinking", "thinking")
"""The variables by which chat templates have a model reason, or not."""
_OBJECT: Json = {"type": "object"}
_BLOCKS: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": _OBJECT}]}
_MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS},
}
_TOOL = re.compile(r"\btools\[(\d{1,9})\]")


class OutputFormat(Body):
    """The schema of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the answer is; `effort` is of no effect."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Thinking(Body):
    """Whether the model reasons before it answers, where its chat template can be told so.

    `adaptive` leaves it to the model. `budget_tokens` and `display` are of no effect.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessagesTool(Body):
    """A tool that the client runs; `input_schema` is the JSON schema of an object."""

    idle = IDLE["cache_control"]
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    type: Literal["custom"] | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None


class MessagesToolChoice(Body):
    """Whether a tool is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _PromptFields(Body):
    """What makes the prompt, in Anthropic's words."""

    idle = IDLE["messages"]
    messages: Annotated[Any, WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE})]
    system: Annotated[Any, WithJsonSchema({"anyOf": [*_BLOCKS["anyOf"], {"type": "null"}]})] = None
    tools: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _OBJECT}, {"type": "null"}]})
    ] = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None


class _AnswerFields(_PromptFields):
    """What an answer has beside its prompt."""

    max_tokens: Count
    stop_sequences: list[str] | None = None


def _with_same(name: str, base: type[Body], route: Route, same: Iterable[str]) -> Any:
    """A body that also has some fields of chats."""
    fields = {field: ChatBody.model_fields[field] for field in same}
    return with_fields(name, base, f"`POST {path_of(route)}`.", fields)


MessagesBody = _with_same("MessagesBody", _AnswerFields, "messages", _SAME)
CountTokensBody = _with_same("CountTokensBody", _PromptFields, "count_tokens", _OF_PROMPT)


class MessagesForm(ChatForm, frozen=True, tag="messages"):
    """How the answer is written; tools and blocks may have been left out."""


class MessagesChat:
    """The chat that a body asks for, and how its refusals name what the client sent."""

    def __init__(self, body: Any) -> None:
        """Raises ApiError naming the field."""
        self._conversation = Conversation()
        self._conversation.read(body.system, body.messages)
        self._tools: list[Json] = []
        self._tool_places: list[int] = []
        self._dropped = {**self._conversation.dropped}
        self._read_tools(body.tools)
        self.fields = self._fields(body)

    @property
    def form(self) -> MessagesForm:
        """How the answer is written."""
        return MessagesForm(dropped_names(self._dropped))

    def refused(self, error: ApiError) -> ApiError:
        """The same refusal, about the fields that the client knows."""
        param = None if error.param is None else self._named(error.param)
        return error.reworded(self._named(error.message), param)

    def _named(self, text: str) -> str:
        def tool(match: re.Match[str]) -> str:
            number = int(match[1])
            known = number < len(self._tool_places)
            return f"tools[{self._tool_places[number]}]" if known else match[0]

        text = _TOOL.sub(tool, self._conversation.by_its_names(text))
        for ours, theirs in _NAMES:
            text = ours.sub(theirs, text)
        return text

    def _read_tools(self, tools: Any) -> None:
        if not isinstance(tools, list | None):
            raise bad_request("tools must be a list", "tools")
        for index, tool in enumerate(tools or ()):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(tool, dict) and kind not in (None, "custom"):
                self._dropped[header_name(str(tool.get("name") or kind))] = None
                continue
            declared = parse_part(MessagesTool, tool, f"tools[{index}]")
            function = {
                "name": declared.name,
                "description": declared.description,
                "parameters": declared.input_schema,
                "strict": declared.strict,
            }
            self._tools.append({"type": "function", "function": function})
            self._tool_places.append(index)

    def _fields(self, body: Any) -> Json:
        goes_on = self._conversation.ends_with_assistant
        config, choice = body.output_config, body.tool_choice
        fields: Json = {name: _as_json(getattr(body, name, None)) for name in _SAME}
        if (fields["tpdet"] or {}).get("resume") is not None:
            raise bad_request(
                "tpdet.resume is for completions and chats: a message is told from its first block",
                "tpdet",
            )
        fields |= {
            "messages": self._conversation.messages,
            "tools": self._tools or None,
            "tool_choice": _choice(choice),
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "max_tokens": getattr(body, "max_tokens", None),
            "stop": getattr(body, "stop_sequences", None) or None,
            "chat_template_kwargs": _variables(body),
            "add_generation_prompt": False if goes_on else None,
            "continue_final_message": True if goes_on else None,
            "response_format": None if config is None else _response_format(config.format),
        }
        fields["tpdet"] = {**(fields["tpdet"] or {}), "fitted": True}
        return {name: value for name, value in fields.items() if value is not None}


_NAMES = (
    (re.compile(r"\.function\.parameters\b"), ".input_schema"),
    (re.compile(r"\.function\."), "."),
    (re.compile(r"^response_format\b"), "output_config"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)


def _choice(choice: MessagesToolChoice | None) -> Any:
    """A chat's `tool_choice`. Raises ApiError."""
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request(
            f"tool_choice of the type {choice.type!r} "
            + ("names no tool" if choice.name is None else "takes no name")
            + f": send {_CHOICES}",
            "tool_choice",
        )
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _variables(body: Any) -> Json | None:
    """The variables of the chat template; those that the client names win."""
    if body.thinking is None or body.thinking.type == "adaptive":
        return _as_json(body.chat_template_kwargs)
    reasons = body.thinking.type == "enabled"
    return {**dict.fromkeys(_SWITCHES, reasons), **(body.chat_template_kwargs or {})}


def _response_format(asked: OutputFormat | None) -> Json | None:
    if asked is None:
        return None
    schema = {"name": "output", "schema": asked.schema_}
    return {"type": "json_schema", "json_schema": schema}


def _as_json(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, Body) else value
