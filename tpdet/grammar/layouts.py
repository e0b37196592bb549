"""How each family of models writes calls, for grammars: as its chat template prints them."""

import re
from collections.abc import Collection
from keyword import iskeyword
from typing import NamedTuple

_BARE = re.compile(r"[\w.\-]+")


class Layout(NamedTuple):
    """A call is `call_begin`, its name, `name_end`, its arguments and `call_end`.

    An answer's calls are `begin`, calls with `between` between two, and `end`. `quoted`: the name
    is a text of JSON. `argument`: what a key and a value of an argument stand between, in three
    parts; empty where arguments are JSON. `marks`: parts of the texts that are tokens where the
    tokenizer has them. `bare`: an answer without a mark is calls if it begins with this.
    `messages`: the answer has harmony's messages. `python`: arguments are keywords. `call_id`: the
    mark between a name and the id of its call, which the model writes.
    """

    call_begin: str
    name_end: str
    call_end: str
    begin: str = ""
    between: str = ""
    end: str = ""
    quoted: bool = True
    argument: tuple[str, str, str] = ("", "", "")
    marks: tuple[str, ...] = ()
    bare: str = ""
    messages: bool = False
    python: bool = False
    call_id: str = ""

    def prints(self, name: str) -> bool:
        """Whether calls can have a tool of this name."""
        if self.python:
            return all(part.isidentifier() and not iskeyword(part) for part in name.split("."))
        return self.quoted or _BARE.fullmatch(name) is not None


_NAME, _ARGUMENTS, _PARAMETERS = '{"name": ', ', "arguments": ', ', "parameters": '
_HARMONY = ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>", "<|start|>")

LAYOUTS = {
    "hermes": Layout(
        f"<tool_call>\n{_NAME}", _ARGUMENTS, "}\n</tool_call>", between="\n",
        marks=("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": Layout(_NAME, _PARAMETERS, "}", between="; ", bare="{"),
    "mistral": Layout(
        _NAME, _ARGUMENTS, "}", begin="[TOOL_CALLS][", between=", ", end="]",
        marks=("[TOOL_CALLS]",),
    ),
    "mistral named": Layout(
        "[TOOL_CALLS]", "[ARGS]", "", quoted=False, marks=("[TOOL_CALLS]", "[ARGS]"),
    ),
    "mistral identified": Layout(
        "[TOOL_CALLS]", "[ARGS]", "", quoted=False, call_id="[CALL_ID]",
        marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "granite": Layout(
        _NAME, _ARGUMENTS, "}", begin="<|tool_call|>[", between=", ", end="]",
        marks=("<|tool_call|>",),
    ),
    "phi4_mini": Layout(
        _NAME, _ARGUMENTS, "}", begin="functools[", between=", ", end="]", marks=("functools",),
    ),
    "pythonic": Layout(
        "", "(", ")", begin="[", between=", ", end="]", quoted=False, python=True, bare="[",
    ),
    "olmo3": Layout(
        "", "(", ")", begin="<function_calls>\n", between="\n", end="\n</function_calls>",
        quoted=False, python=True, marks=("<function_calls>", "</function_calls>"),
    ),
    "qwen3_coder": Layout(
        "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", between="\n", quoted=False,
        argument=("<parameter=", ">\n", "\n</parameter>\n"),
        marks=("<tool_call>", "</tool_call>"),
    ),
    "seed_oss": Layout(
        "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", between="\n",
        quoted=False, argument=("<parameter=", ">", "</parameter>\n"),
        marks=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "glm45": Layout(
        "<tool_call>", "\n", "</tool_call>", between="\n", quoted=False,
        argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
               "</arg_value>"),
    ),
    "glm47": Layout(
        "<tool_call>", "", "</tool_call>", quoted=False,
        argument=("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
               "</arg_value>"),
    ),
    "harmony": Layout(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>",
        quoted=False, marks=_HARMONY, messages=True,
    ),
}  # fmt: skip
"""By the name of the family (`tpdet.text.parsing`), or of a form of it."""


def layout_of(family: str, tokens: Collection[str], template: str) -> str:
    """The name of a family's layout.

    tokens: the tokenizer's added tokens; template: the source of the chat template.
    """
    if family == "mistral" and "[ARGS]" in tokens:
        return "mistral identified" if "[CALL_ID]" in tokens else "mistral named"
    if family == "glm":
        return "glm45" if re.search(r"</arg_key>(\n|\\n)", template) else "glm47"
    return family
