"""How each family of models writes calls, for grammars: as its chat template prints them."""

import re
from collections.abc import Collection
from keyword import iskeyword
from pathlib import Path

import msgspec

_BARE = re.compile(r"[\w.\-]+")


class Layout(msgspec.Struct, frozen=True):
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


LAYOUTS = msgspec.json.decode(
    Path(__file__).with_suffix(".json").read_bytes(), type=dict[str, Layout]
)
"""By the name of the family (`tpdet.text.parsing`), or of a form of it."""


def layout_of(family: str, tokens: Collection[str], template: str) -> str:
    """A family's layout, by the tokenizer's added tokens and the source of the chat template."""
    if family == "mistral" and "[ARGS]" in tokens:
        return "mistral identified" if "[CALL_ID]" in tokens else "mistral named"
    if family == "glm":
        return "glm45" if re.search(r"</arg_key>(\n|\\n)", template) else "glm47"
    return family
