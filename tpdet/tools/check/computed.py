"""A recorded line as it should be, and what differs of it, field by field.

Both are JSON of one form. Token ids and their bits are compared first (`first_difference`), then
all else that a reader may believe. What no computation can tell is in UNCHECKED.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from tpdet.audit.fingerprint import read_fingerprint
from tpdet.audit.recorded import (
    ChangedPart,
    Difference,
    RecordedAnswer,
    RecordedChoice,
    first_difference,
)
from tpdet.tools.check.answers import BatchLine, Line

UNCHECKED = frozenset({
    "id", "custom_id", "request_id", "response.body.created", "response.body.created_at",
    "response.body.completed_at",
})  # fmt: skip
"""Names and times, which are no function of the request. The id of an answer over HTTP stands
twice in its line, and is compared with itself."""

_LATER = frozenset({"replay_version", "max_tokens", "logprobs_mode", "request_digest"})
"""Fields that answers of earlier versions do not have."""

_TOKENS = ("token_ids", "logprob_bits")
_FINGERPRINT, _MODEL = "system_fingerprint", "model"
_OPEN = {
    "chat.completion": ("usage.prompt_tokens_details.cached_tokens",),
    "message": ("usage.input_tokens", "usage.cache_read_input_tokens"),
    "response": ("usage.input_tokens_details.cached_tokens", "max_output_tokens"),
}
"""Fields of answers that depend on what else ran, or on the limit that was cut, by their type."""
_VERIFIED = ("accepted", "rejected")


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
    """Fields of a line that are not what was computed, but for UNCHECKED and `unchecked` paths."""
    theirs, ours = dict(_leaves(recorded)), dict(_leaves(computed))
    changed = []
    for path in [*theirs, *(path for path in ours if path not in theirs)]:
        name = path.rpartition(".")[2]
        if path in UNCHECKED or path in unchecked or name.partition("[")[0] in _TOKENS:
            continue
        if path not in theirs and name in _LATER:
            continue
        part = ChangedPart(path, theirs.get(path), ours.get(path), path in theirs, path in ours)
        if not part.equal:
            changed.append(part)
    return changed


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


class Compared(NamedTuple):
    """What differs of a line, in order; and what only names another environment."""

    line: Line
    differences: list[Difference | ChangedPart]
    elsewhere: list[Elsewhere]


def compare_line(
    line: Line, choices: Collection[RecordedChoice], computed: dict[str, Any]
) -> Compared:
    """Hold a line against what it should be: its tokens first, then every other field."""
    token = first_difference(line.choices, [*choices])
    differences: list[Difference | ChangedPart] = [] if token is None else [token]
    others = []
    for part in changed_parts(line.fields, computed, _counts_of_load(line)):
        other = elsewhere(line.number, part)
        if other is None or (part.part.endswith(".model") and _asked_model(line) is not None):
            differences.append(part)
        else:
            others.append(other)
    return Compared(line, differences, others)


def batch_line(line: Line, body: dict[str, Any]) -> dict[str, Any]:
    """A line of a batch around a body that was computed again.

    Its id is the recorded one, and so are the seeds where the request left them open.
    """
    answer, fields = line.answer, line.fields
    assert isinstance(answer, BatchLine)
    response, model = fields["response"], _asked_model(line)
    receipt = {**body["tpdet"], "seed": answer.request.body.get("seed")}
    if receipt["seed"] is None:
        receipt["seed"] = answer.response.body.tpdet.seed
    own = answer.request.body.get("tpdet")
    seeds = own.get("seeds") if isinstance(own, dict) else None
    if isinstance(seeds, list) and seeds:
        differ = seeds.count(seeds[0]) < len(seeds)
        receipt |= {"seed": None, "seeds": seeds} if differ else {"seed": seeds[0]}
    body = {
        **body,
        "id": response.get("request_id", line.body.get("id")),
        "model": body["model"] if model is None else model,
        "tpdet": receipt,
    }
    request = {"url": answer.request.url, "body": answer.request.body}
    names: dict[str, Any] = {n: fields[n] for n in ("id", "custom_id") if n in fields}
    inner = {"status_code": 200, "request_id": response.get("request_id"), "body": body}
    return {**names, "response": inner, "error": None, "request": request}


def offline_line(line: Line, answered: dict[str, Any]) -> dict[str, Any]:
    """A line of `tpdet generate --json` around an answer's own fields and its record's."""
    answer, fields = line.answer, line.fields
    assert isinstance(answer, RecordedAnswer)
    known, params = answer.params.__struct_fields__, fields["params"]
    params = {name: value for name, value in params.items() if name in known}
    if params.get("seed") is not None:
        params["seed"] = answer.seed
    whole = {**answered, "seed": answer.seed, "params": params, "prompt": fields.get("prompt")}
    return {name: whole[name] for name in whole if name in fields} if line.is_bare else whole


def _asked_model(line: Line) -> Any:
    answer = line.answer
    return answer.request.body.get("model") if isinstance(answer, BatchLine) else None


def _counts_of_load(line: Line) -> list[str]:
    """The counts of cached tokens, and of a prediction's: they depend on what else ran."""
    answer = line.answer
    is_http = isinstance(answer, BatchLine)
    has_prediction = isinstance(answer, BatchLine) and "prediction" in answer.request.body
    usage = "response.body.usage"
    details = f"{usage}.completion_tokens_details"
    verified = [f"{details}.{name}_prediction_tokens" for name in _VERIFIED if has_prediction]
    kind = line.body.get("type") or line.body.get("object") if is_http else ""
    return [*verified, *(f"response.body.{name}" for name in _OPEN.get(str(kind), ()))]
