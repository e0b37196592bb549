"""The form that a whole answer has, as text: a JSON schema, a regular expression, tool calls."""

import re
from typing import Literal, NamedTuple

from tpdet.errors import RequestError
from tpdet.requests.field_ranges import MAX_SCHEMA_BYTES, MAX_TOOL_BYTES

FormKind = Literal["json_schema", "regex", "tool_calls"]
_WITH_A_MEANING = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")  # in a regular expression


class AnswerForm(NamedTuple):
    """What an answer follows to its end; equal forms allow the same texts."""

    kind: FormKind
    text: str

    @property
    def noun(self) -> str:
        """What messages call it."""
        return {"json_schema": "schema", "regex": "regex", "tool_calls": "tools"}[self.kind]

    @property
    def field(self) -> str:
        """The field of a request that messages name."""
        return FIELDS[self.kind]


FIELDS: dict[FormKind, str] = {
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "tool_calls": "tools",
}
"""The field of a request that asks for a form, by its kind."""


def check_form(kind: FormKind, text: object) -> None:
    """A form as text, or None; its compilation finds out whether it is usable."""
    if text is None:
        return
    if not isinstance(text, str):
        raise RequestError(
            f"json_schema must be JSON text, not {type(text).__name__}: give json.dumps(schema)"
            if kind == "json_schema"
            else f"{kind} must be text, not {type(text).__name__}",
            FIELDS[kind],
        )
    form = AnswerForm(kind, text)
    if not text.isascii() and text.encode(errors="ignore").decode() != text:
        raise RequestError(f"the {form.noun} holds half of a surrogate pair", form.field)
    size = len(text.encode("utf-8", "surrogatepass"))
    most = MAX_TOOL_BYTES if kind == "tool_calls" else MAX_SCHEMA_BYTES
    if size > most:
        noun = "names and schemas of tools" if kind == "tool_calls" else f"a {form.noun}"
        raise RequestError(f"{noun} of {size} bytes is over the limit of {most}", form.field)


def regex_of_choice(texts: tuple[str, ...]) -> str:
    """The regular expression of an answer that is one of `texts`."""
    return "|".join(_WITH_A_MEANING.sub(r"\\\g<0>", text) for text in texts)
