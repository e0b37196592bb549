"""The tools of a request: their declarations, which of them may be called, and the calls so far.

Field names follow the OpenAI API. What a family of models can print of them is its parser's affair.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec

from tpdet.errors import RequestError

MAX_TOOLS = 1024
MAX_NAME = 256  # characters
Mode = Literal["auto", "required"]
_UNSAFE = re.compile(r"[^a-z0-9_.-]+")
_MOST_NAMED, _MOST_CHARACTERS = 16, 48  # of the tools that were left out
_CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
_ALLOWED = (
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": '
    '[{"type": "function", "function": {"name": ...}}]}}'
)


class Tool(NamedTuple):
    """One function that may be called; `parameters` is a JSON schema, None for any arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def declared(self) -> dict[str, Any]:
        """The tool as templates read it: the fields that the client sent, in OpenAI's order."""
        fields = {key: value for key, value in self._asdict().items() if value is not None}
        return {"type": "function", "function": fields}


class ToolUse(NamedTuple):
    """The tools of a request and how they may be used.

    mode: "required" if the answer has to call. allowed: names that may be called. named: one tool
    was named, and it alone is called, once. parallel: an answer may have several calls.
    """

    tools: tuple[Tool, ...]
    mode: Mode = "auto"
    allowed: tuple[str, ...] = ()
    named: bool = False
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if tool.name in self.allowed)

    @property
    def constrains(self) -> bool:
        """Whether an answer has to follow a grammar: not every text without it would be right."""
        some = len(self.allowed) < len(self.tools)
        strict = any(tool.strict for tool in self.callable)
        return self.mode == "required" or strict or some or not self.parallel

    def declared(self) -> list[dict[str, Any]]:
        """All tools, as templates read them."""
        return [tool.declared() for tool in self.tools]


def read_tools(tools: Any, choice: Any = None, parallel: bool | None = None) -> ToolUse | None:
    """The use of the tools that a request declares; None where it uses none.

    choice: its `tool_choice`; with "none" it is as if it had no tools. Raises RequestError naming
    the field, the value and the remedy.
    """
    if tools is None or (isinstance(tools, list | tuple) and not tools):
        if choice not in (None, "none", "auto"):
            raise RequestError(f"tool_choice {choice!r:.80} needs tools: send some", "tool_choice")
        return None
    if not isinstance(tools, list | tuple):
        raise RequestError(f"tools must be a list, not {tools!r:.60}", "tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{len(tools)} tools; the limit is {MAX_TOOLS}", "tools")
    declared = tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    names: dict[str, int] = {}
    for index, tool in enumerate(declared):
        if tool.name in names:
            raise RequestError(
                f"tools[{names[tool.name]}] and tools[{index}] are both called {tool.name!r}: give "
                "each a name of its own",
                "tools",
            )
        names[tool.name] = index
    use = _chosen(choice, declared)
    if use is None or parallel is not False:
        return use
    return use._replace(parallel=False)


def header_name(name: str) -> str:
    """The name or the type of a tool as a header may hold it."""
    return _UNSAFE.sub("-", name.lower())[:_MOST_CHARACTERS]


def dropped_names(names: Iterable[str]) -> tuple[str, ...]:
    """The first few of the tools that were left out, as a header and the log name them."""
    return tuple(islice(names, _MOST_NAMED))


class ChatForm(msgspec.Struct, frozen=True):
    """The form of another API that a chat's answer has; dropped: `dropped_names` of its body."""

    dropped: tuple[str, ...] = ()

    @property
    def api(self) -> Any:
        """The route that has this form."""
        return self.__struct_config__.tag

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the head of the answer says of the request."""
        names = ", ".join(self.dropped).encode()
        return [(b"tpdet-dropped-tools", names)] if names else []


def check_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse (RequestError) a history of which a call has no result, or a result has no call.

    messages: in a template's form. A result names its call by `tool_call_id`; where it or the call
    has no id, results are those of the calls in their order.
    """
    open_calls: OrderedDict[str | int, None] = OrderedDict()  # by id, or place where it has none
    asked = -1
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message["role"] == "tool":
            _answer(where, message.get("tool_call_id"), open_calls)
            continue
        _check_answered(asked, open_calls)
        calls = message.get("tool_calls") or ()
        open_calls, asked = OrderedDict(), index
        for number, call in enumerate(calls):
            name = call.get("id")
            if name in open_calls:
                raise RequestError(
                    f"{where}.tool_calls has the id {name!r:.80} twice: give each call its own",
                    f"{where}.tool_calls",
                )
            open_calls[number if name is None else name] = None
    _check_answered(asked, open_calls)


def _answer(where: str, name: str | None, open_calls: OrderedDict[str | int, None]) -> None:
    """Take the call off that a result is of."""
    unnamed = (call for call in open_calls if name is None or isinstance(call, int))
    call = name if name in open_calls else next(unnamed, None)
    if call is not None:
        del open_calls[call]
    else:
        what = "a tool's result" if name is None else f"the result of call {name!r:.80}"
        raise RequestError(
            f"{where} is {what}, and no call before it waits for one: put it behind the "
            "assistant's message with tool_calls",
            f"{where}.tool_call_id",
        )


def _check_answered(asked: int, open_calls: OrderedDict[str | int, None]) -> None:
    for call in open_calls:
        name = "" if isinstance(call, int) else f" {call!r:.80}"
        raise RequestError(
            f"messages[{asked}]: the tool call{name} has no result: put a message of role tool "
            "behind it, or leave the call out",
            f"messages[{asked}].tool_calls",
        )


def _tool(where: str, tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise RequestError(
            f'{where} must be {{"type": "function", "function": {{"name": ...}}}}: no other type '
            "of tool is called",
            "tools",
        )
    fields = {key: value for key, value in function.items() if value is not None}
    for key in fields.keys() - {*Tool._fields}:
        known = ", ".join(Tool._fields)
        raise RequestError(f"{where}.function has {key!r:.60}: its fields are {known}", "tools")
    name = fields.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise RequestError(
            f"{where}.function.name is {name!r:.80}: give it 1 to {MAX_NAME} printable characters",
            "tools",
        )
    kinds = {"description": str, "parameters": Mapping, "strict": bool}
    for key, kind in kinds.items():
        if key in fields and not isinstance(fields[key], kind):
            noun = {str: "text", Mapping: "a JSON schema, an object", bool: "true or false"}[kind]
            raise RequestError(f"{where}.function.{key} must be {noun}", "tools")
    return Tool(**fields)


def _chosen(choice: Any, tools: tuple[Tool, ...]) -> ToolUse | None:
    """How the tools may be used by a `tool_choice`; None for "none"."""
    names = {tool.name: True for tool in tools}
    if choice == "none":
        return None
    if choice is None or choice in ("auto", "required"):
        return ToolUse(tools, choice or "auto", tuple(names))
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return ToolUse(tools, "required", (_known(choice, names),), named=True, parallel=False)
    if kind != "allowed_tools":
        raise RequestError(
            f"tool_choice {choice!r:.80} is not supported: send {_CHOICES}, or {_ALLOWED}",
            "tool_choice",
        )
    allowed = choice.get("allowed_tools")
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(listed, list | tuple) or not listed:
        raise RequestError(f"tool_choice has no allowed tools: send {_ALLOWED}", "tool_choice")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise RequestError(
            f'tool_choice.allowed_tools.mode is {mode!r:.60}: send "auto" or "required"',
            "tool_choice",
        )
    chosen = {_known(one, names) for one in listed}
    return ToolUse(tools, mode, tuple(name for name in names if name in chosen))


def _known(chosen: Any, names: Mapping[str, bool]) -> str:
    function = chosen.get("function") if isinstance(chosen, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        some = ", ".join([*names][:8])
        raise RequestError(
            f"tool_choice names the tool {name!r:.80}, which tools do not declare: name one of "
            f"{some:.200}",
            "tool_choice",
        )
    return name
