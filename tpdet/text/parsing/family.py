"""How the models of a family write calls of tools: the form of the data in `families.json`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

Form = Literal["json", "named_json", "tagged", "python", "harmony"]


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a call that has a tag for each argument; `name_end` ends the call's name.

    A value ends at `value_end`, which may be missing in front of what ends the call or of the next
    key. `line_breaks`: one line break behind a value's first tag and one in front of its last are
    not part of it.
    """

    name_end: str
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    call_begin: str = ""
    call_end: str = ""
    line_breaks: bool = False


@dataclass(frozen=True, slots=True)
class CallFamily:
    """How calls are written. `tool_names` are vLLM's and SGLang's of its parsers; `template` what
    all of its chat templates have, and none of a family behind it.

    `begin` and `end` are terminals. One that is an added token of the tokenizer is that token's id
    and never its letters; another is text, if `text` has it. `form` is what stands between them:

    - json: an object `{"name": ..., "arguments": {...}}`, or a list of them;
    - named_json: a name and an object, or what json has;
    - tagged: a name, and keys and values between `tags`;
    - python: calls as Python writes them, in brackets or a line each;
    - harmony: messages that are addressed to a tool.

    `unmarked`: an answer may also begin with one of these characters and be nothing but calls.
    `line_begin`: begins, of `begin`, that count at the beginning of a line only, where they may be
    text after all, and are part of what is between. `separator` may stand between two calls.
    `needs_end`: a call without its end is none. `call_id` and `arguments` are the terminals behind
    a name, and behind an id. `in_reasoning`: a call may stand in reasoning that does not end.
    """

    name: str
    form: Form
    tool_names: tuple[str, ...]
    template: tuple[str, ...]
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    unmarked: str = ""
    line_begin: tuple[str, ...] = ()
    separator: str = ""
    needs_end: bool = True
    call_id: str = ""
    arguments: str = ""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    tags: Tags | None = None
    in_reasoning: bool = False


FAMILIES = msgspec.json.decode(
    Path(__file__).with_name("families.json").read_bytes(), type=tuple[CallFamily, ...]
)
"""In the order in which a template is asked whose it is."""

TOOL_PARSERS = {name: family for family in FAMILIES for name in (family.name, *family.tool_names)}
"""The families by their own names, and by both engines' names of their parsers."""
