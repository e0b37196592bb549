"""The form that a whole answer has: a JSON schema or a regular expression, as text."""

import re
from typing import Literal, NamedTuple

from tpdet.errors import RequestError
from tpdet.requests.field_ranges import MAX_SCHEMA_BYTES

_WITH_A_MEANING = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")  # in a regular expression


class AnswerForm(NamedTuple):
    """What an answer follows to its end; equal forms allow the same texts."""

    kind: Literal["json_schema", "regex"]
    text: str

    @property
    def noun(self) -> str:
        """What messages call it."""
        return "schema" if self.kind == "json_schema" else "regex"

    @property
    def field(self) -> str:
        """The field of a request that messages name."""
        return "response_format" if self.kind == "json_schema" else "structured_outputs"


def check_form(kind: Literal["json_schema", "regex"], text: object) -> None:
    """A form as text, or None; its compilation finds out whether it is usable."""
    if text is None:
        return
    if not isinstance(text, str):
        raise RequestError(
            f"json_schema must be JSON text, not {type(text).__name__}: give json.dumps(schema)"
            if kind == "json_schema"
            else f"regex must be text, not {type(text).__name__}",
            AnswerForm(kind, "").field,
        )
    form = AnswerForm(kind, text)
    if not text.isascii() and text.encode(errors="ignore").decode() != text:
        raise RequestError(f"the {form.noun} holds half of a surrogate pair", form.field)
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(
            f"a {form.noun} of {size} bytes is over the limit of {MAX_SCHEMA_BYTES}", form.field
        )


def regex_of_choice(texts: tuple[str, ...]) -> str:
    """The regular expression of an answer that is one of `texts`."""
    return "|".join(_WITH_A_MEANING.sub(r"\\\g<0>", text) for text in texts)
