"""API fields without an effect here: which values are accepted, why others are refused.

Clients, and wrappers around them, send many fields unasked. A value that asks for nothing
(`store: false`, `tools: []`) is accepted; any other is refused, with what to do instead.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Idle(NamedTuple):
    """The values that ask for nothing (none: only null does), and why others are refused."""

    values: tuple[object, ...]
    reason: str

    def accepts(self, value: object) -> bool:
        """Whether a value asks for nothing; 1 and 1.0 are one number, 1 and true are not."""
        return any(_kind(value) is _kind(one) and value == one for one in self.values)


def _tables() -> dict[str, dict[str, Idle]]:
    """The idle fields of each body: a reason, then the values that ask for nothing.

    `like` names bodies whose fields it has too; a name in a reason's place is that of a body with
    the same field.
    """
    content = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    tables: dict[str, dict[str, Idle]] = {}
    for body, rows in json.loads(content).items():
        fields: dict[str, Idle] = {}
        for other in rows.pop("like", ()):
            fields |= tables[other]
        for name, row in rows.items():
            is_name = isinstance(row, str)
            fields[name] = tables[row][name] if is_name else Idle((*row[1:],), row[0])
        tables[body] = fields
    return tables


IDLE = _tables()
"""By body, then by field."""


def add_to_schema(schema: dict[str, Any], fields: dict[str, Idle]) -> None:
    """Publish the values that ask for nothing as properties of a body's JSON schema."""
    for name, idle in sorted(fields.items()):
        if idle.values:
            schema["properties"][name] = {
                "enum": [*idle.values, None],
                "description": f"Taken, without effect. Anything else is refused: {idle.reason}.",
            }


def _kind(value: object) -> type:
    """A value's type; numbers are of one."""
    return float if type(value) is int else type(value)
