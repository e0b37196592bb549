"""Real texts for `tpdet bench drafts`: code that is edited, JSON by a schema, chat."""

import json
from pathlib import Path
from typing import NamedTuple

_TEXTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_SCHEMA = json.dumps(_TEXTS["schema"])
_CODE = "".join(f"{line}\n" for line in _TEXTS["code"])


class Text(NamedTuple):
    """A request: a question for a chat, or text to go on with; its schema."""

    question: str = ""
    beginning: str = ""
    schema: str | None = None


def edit(what: str) -> Text:
    """Code, and the beginning of its edited copy."""
    return Text(
        beginning=f"Some Python code:\n\n```python\n{_CODE}```\n\n"
        f"The same code with {what}, and nothing else changed:\n\n```python\n"
    )


TEXTS = {
    "code edits": tuple(edit(what) for what in _TEXTS["edits"]),
    "JSON by schema": tuple(
        Text(it, schema=json.dumps(_TEXTS["schema"])) for it in _TEXTS["describe"]
    ),
    "chat": tuple(Text(it) for it in _TEXTS["questions"]),
}
"""The requests of each kind."""
