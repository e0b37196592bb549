"""A recorded line as it should be, written anew from an answer that was computed again."""

from collections.abc import Collection
from typing import Any, NamedTuple

from tpdet.llm.recorded import (
    ChangedPart,
    Difference,
    RecordedAnswer,
    RecordedChoice,
    first_difference,
)
from tpdet.tools.check.answers import BatchLine, Line
from tpdet.tools.check.parts import Elsewhere, changed_parts, elsewhere

_VERIFIED = ("accepted", "rejected")


class Compared(NamedTuple):
    """What differs of a line, in order; and what only names another environment."""

    line: Line
    differences: list[Difference | ChangedPart]
    elsewhere: list[Elsewhere]


def compare_line(
    line: Line,
    choices: Collection[RecordedChoice],
    computed: dict[str, Any],
) -> Compared:
    """Hold a line against what was computed: its tokens first, then every other field.

    computed: the line as it should be.
    """
    found: list[Difference | ChangedPart] = []
    token = first_difference(line.choices, [*choices])
    if token is not None:
        found.append(token)
    others = []
    for part in changed_parts(line.fields, computed, _counts_of_load(line)):
        other = elsewhere(line.number, part)
        if other is None or (part.part.endswith(".model") and _asked_model(line) is not None):
            found.append(part)
        else:
            others.append(other)
    return Compared(line, found, others)


def batch_line(line: Line, body: dict[str, Any]) -> dict[str, Any]:
    """A line of a batch around a body that was computed again.

    Its id is the recorded one, and so is the seed where the request left it open.
    """
    answer, fields = line.answer, line.fields
    assert isinstance(answer, BatchLine)
    response = fields["response"]
    receipt = {**body["tpdet"], "seed": answer.request.body.get("seed")}
    if receipt["seed"] is None:
        receipt["seed"] = answer.response.body.tpdet.seed
    body = {
        **body,
        "id": response.get("request_id", line.body.get("id")),
        "model": body["model"] if _asked_model(line) is None else _asked_model(line),
        "tpdet": receipt,
    }
    request = {"url": answer.request.url, "body": answer.request.body}
    found: dict[str, Any] = {n: fields[n] for n in ("id", "custom_id") if n in fields}
    inner = {"status_code": 200, "request_id": response.get("request_id"), "body": body}
    return {**found, "response": inner, "error": None, "request": request}


def offline_line(line: Line, answered: dict[str, Any]) -> dict[str, Any]:
    """A line of `tpdet generate --json` around an answer's own fields and its record's."""
    answer, fields = line.answer, line.fields
    assert isinstance(answer, RecordedAnswer)
    known, given = answer.params.__struct_fields__, fields["params"]
    params = {name: value for name, value in given.items() if name in known}
    if params.get("seed") is not None:
        params["seed"] = answer.seed
    found = {**answered, "seed": answer.seed, "params": params, "prompt": fields.get("prompt")}
    return {name: found[name] for name in found if name in fields} if line.is_bare else found


def _asked_model(line: Line) -> Any:
    answer = line.answer
    return answer.request.body.get("model") if isinstance(answer, BatchLine) else None


def _counts_of_load(line: Line) -> list[str]:
    """The counts of a prediction's tokens, if there was one: they depend on what else ran."""
    answer = line.answer
    has_prediction = isinstance(answer, BatchLine) and "prediction" in answer.request.body
    details = "response.body.usage.completion_tokens_details"
    return [f"{details}.{name}_prediction_tokens" for name in _VERIFIED if has_prediction]
