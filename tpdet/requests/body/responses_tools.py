"""Tools of the Responses API as tools of a chat: functions, namespaces of them, and free text.

A tool of a namespace is called `namespace__name`; one of the type `custom` is a function of one
text, `input`. Tools of other types, which other servers run themselves, are left out by name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tpdet.requests.body.problems import bad_request
from tpdet.requests.tools import dropped_names, header_name

Json = dict[str, Any]
INPUT = "input"
"""The one argument of a custom tool."""
_OF_INPUT = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_FIELDS = ("name", "description", "parameters", "strict")
_TAKEN = frozenset(
    "type defer_loading allowed_callers async output_schema cache_control format".split()
)
"""Fields of a tool that change no answer."""


class NamedTool(NamedTuple):
    """A tool as its client names it."""

    kind: str
    name: str
    namespace: str = ""


class ResponseTools(NamedTuple):
    """The tools of a request in a chat's form.

    declared, choice: of a chat. names: by the names in `declared`. shown: what the answer repeats.
    dropped: the types of those that were left out.
    """

    declared: list[Json]
    choice: Any
    names: dict[str, NamedTool]
    shown: list[Json]
    dropped: tuple[str, ...]

    @classmethod
    def of(cls, tools: Any, choice: Any) -> "ResponseTools":
        """The tools and the `tool_choice` of a body. Raises ApiError naming the field."""
        chat = cls([], None, {}, [], ())
        if not isinstance(tools, list | None):
            raise bad_request("tools must be a list", "tools")
        dropped: dict[str, None] = {}
        for index, tool in enumerate(tools or ()):
            chat._add(f"tools[{index}]", tool, "", dropped)
        if not chat.declared and choice == "auto":
            choice = None
        return chat._replace(choice=chat._chosen(choice), dropped=dropped_names(dropped))

    def _add(self, where: str, tool: Any, namespace: str, dropped: dict[str, None]) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise bad_request(f'{where} must be an object with a type, such as "function"', "tools")
        form = tool.get("format")
        has_grammar = kind == "custom" and isinstance(form, dict) and form.get("type") != "text"
        if kind == "namespace" and not namespace:
            self._add_namespace(where, tool, dropped)
        elif kind in ("function", "custom") and not has_grammar:
            name = tool.get("name")
            if not isinstance(name, str) or not name:
                raise bad_request(f"{where}.name is {name!r:.60}: give the tool a name", "tools")
            self._check_fields(where, tool)
            seen = f"{namespace}__{name}" if namespace else name
            fields = {key: tool[key] for key in _FIELDS if tool.get(key) is not None}
            if kind == "custom":
                fields |= {"parameters": _OF_INPUT, "strict": True}
            self.declared.append({"type": "function", "function": fields | {"name": seen}})
            self.names.setdefault(seen, NamedTool(kind, name, namespace))
            if not namespace:
                self.shown.append(_filled(tool))
        else:
            name = f"{kind}-grammar" if has_grammar else kind
            dropped[header_name(name)] = None

    def _add_namespace(self, where: str, tool: Json, dropped: dict[str, None]) -> None:
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name or not isinstance(inner, list):
            raise bad_request(
                f"{where} is a namespace: give it a name and a list of tools", "tools"
            )
        for index, one in enumerate(inner):
            self._add(f"{where}.tools[{index}]", one, name, dropped)
        self.shown.append(tool)

    def _check_fields(self, where: str, tool: Json) -> None:
        for key, value in tool.items():
            if key not in _TAKEN and key not in _FIELDS and value is not None:
                known = ", ".join(_FIELDS)
                raise bad_request(
                    f"{where} has the unknown field {key!r:.60}: its fields are {known}",
                    "tools",
                    "unknown_field",
                )

    def _chosen(self, choice: Any) -> Any:
        """A chat's `tool_choice`."""
        if not isinstance(choice, Mapping):
            return choice
        if choice.get("type") != "allowed_tools":
            return self._named(choice)
        listed = choice.get("tools")
        tools = [*map(self._named, listed)] if isinstance(listed, list) else listed
        mode = choice.get("mode", "auto")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    def _named(self, choice: Any) -> Any:
        """The chosen tool, by the name that the model sees."""
        kind = choice.get("type") if isinstance(choice, Mapping) else None
        if kind not in ("function", "custom"):
            raise bad_request(
                f"tool_choice names a tool of the type {kind!r:.60}, and only those of the types "
                '"function" and "custom" are called here: name one of them',
                "tool_choice",
            )
        name, namespace = choice.get("name"), choice.get("namespace")
        if not isinstance(name, str):
            raise bad_request(
                f"tool_choice names the tool {name!r:.80}: send its name as text", "tool_choice"
            )
        if isinstance(namespace, str):
            name = f"{namespace}__{name}"
        elif name not in self.names:
            inner = [seen for seen, tool in self.names.items() if tool.name == name]
            name = inner[0] if len(inner) == 1 else name
        return {"type": "function", "function": {"name": name}}


def _filled(tool: Json) -> Json:
    """A function as answers repeat it: with every field of OpenAI's schema."""
    if tool["type"] != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None} | tool
