"""Holds a recorded answer against the one that was computed again, field by field.

Both are JSON of one form. Token ids and their bits are compared before (`first_difference`); all
else that a reader may believe is compared here. What no computation can tell is in UNCHECKED.
"""

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from tpdet.audit.fingerprint import read_fingerprint
from tpdet.llm.recorded import ChangedPart

UNCHECKED = frozenset({"id", "custom_id", "request_id", "response.body.created"})
"""Names and times, which are no function of the request. The id of an answer over HTTP stands
twice in its line, and is compared with itself."""

_LATER = frozenset({"replay_version", "max_tokens"})
"""Fields that answers of earlier versions do not have."""

_TOKENS = ("token_ids", "logprob_bits")
_FINGERPRINT, _MODEL = "system_fingerprint", "model"


class Elsewhere(msgspec.Struct, frozen=True):
    """What names another environment of an answer with equal bits: no part of it is wrong.

    part: the fingerprint, where only the architecture in it is another one (of another instruction
        set or version of torch), or the name under which a server serves the model.
    """

    line: int
    part: str
    recorded: Any
    computed: Any


def changed_parts(
    recorded: dict[str, Any], computed: dict[str, Any], unchecked: Collection[str] = ()
) -> list[ChangedPart]:
    """The fields of a line that are not what was computed, in the line's order.

    unchecked: paths that this line's request leaves open, beside UNCHECKED.
    """
    theirs, ours = dict(_leaves(recorded)), dict(_leaves(computed))
    found = []
    for path in [*theirs, *(path for path in ours if path not in theirs)]:
        name = path.rpartition(".")[2]
        if path in UNCHECKED or path in unchecked or name.partition("[")[0] in _TOKENS:
            continue
        if path not in theirs and name in _LATER:
            continue
        part = ChangedPart(path, theirs.get(path), ours.get(path), path in theirs, path in ours)
        if not part.equal:
            found.append(part)
    return found


def elsewhere(line: int, part: ChangedPart) -> Elsewhere | None:
    """A part as what names another environment; None if it is a difference of the answer."""
    name = part.part.rpartition(".")[2]
    if name == _FINGERPRINT:
        theirs, ours = read_fingerprint(part.recorded), read_fingerprint(part.computed)
        if theirs is None or ours is None or theirs[:2] != ours[:2]:
            return None
    elif part.part != f"response.body.{_MODEL}":
        return None
    return Elsewhere(line, part.part, part.recorded, part.computed)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that holds no others, an empty object or list too, by its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
