"""The verbs of the control routes, and the fields of each; the values are JSON's, or a query's.

Names and defaults follow vLLM's routes and, where SGLang has a route of another name, SGLang's.
"""

import re
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.server.wire.weight_fields import WEIGHT_FIELDS, ControlFields

__all__ = ["ControlFields", "fields_of", "read_fields"]

MAX_NAME_CHARACTERS = 256
_NAMES = ("new_version", "weight_version")
"""Fields that say what weights are called."""
_NAMED = re.compile(
    r"Object (contains unknown|missing required) field `(.*?)`(?: - at `\$\.(.*)`)?", re.DOTALL
)


class PauseFields(ControlFields, frozen=True, kw_only=True):
    """`clear_cache`: forget cached pages too, unless requests are kept.

    `keep_kv`: kept requests go on with their old keys and values after an update of the weights.
    """

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True
    keep_kv: bool = False


class AbortFields(ControlFields, frozen=True, kw_only=True):
    """Ids of answers or of HTTP requests; None for all that run or wait."""

    request_ids: tuple[str, ...] | None = None


class AbortOneFields(ControlFields, frozen=True, kw_only=True):
    """SGLang's names of an answer's id, or of all."""

    rid: str = ""
    abort_all: bool = False


class ResetFields(ControlFields, frozen=True, kw_only=True):
    """`reset_running_requests` false: running requests keep what they have computed.

    `reset_external` is of caches that other engines have, and changes nothing.
    """

    reset_running_requests: bool = True
    reset_external: bool = False


class FlushFields(ControlFields, frozen=True, kw_only=True):
    """SGLang's `timeout`, in seconds, changes nothing: nothing is waited for."""

    timeout: float | None = None


class VersionFields(ControlFields, frozen=True, kw_only=True):
    """What weights are called from now on; SGLang's `abort_all_requests` ends running requests."""

    new_version: str
    abort_all_requests: bool = False


class CheckFields(ControlFields, frozen=True, kw_only=True):
    """`baseline`: an earlier answer's `checksums`, to compare with."""

    action: Literal["checksum", "compare", "reset"] = "checksum"
    baseline: dict[str, str] = msgspec.field(default_factory=dict)


class PauseGenerationFields(ControlFields, frozen=True, kw_only=True):
    """SGLang's modes of a pause."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


FIELDS: dict[str, type[ControlFields]] = {
    "pause": PauseFields,
    "resume": ControlFields,
    "is_paused": ControlFields,
    "abort_requests": AbortFields,
    "reset_prefix_cache": ResetFields,
    "weight_info": ControlFields,
    "update_weight_version": VersionFields,
    "weight_checker": CheckFields,
    "pause_generation": PauseGenerationFields,
    "continue_generation": ControlFields,
    "abort_request": AbortOneFields,
    "flush_cache": FlushFields,
    **WEIGHT_FIELDS,
}


def fields_of(verb: str, values: dict[str, Any], texts: dict[str, str]) -> bytes:
    """JSON of a verb's fields, from a body's values and a query's texts. Raises ApiError."""
    kind = FIELDS[verb]
    for name in texts:
        if name not in kind.__struct_fields__:
            raise bad_request(f"{name} is no parameter of this route", name, "unknown_field")
        if name in values:
            raise bad_request(f"{name} is given in the query and in the body: give one", name)
    try:
        query = msgspec.convert(texts, dict[str, Any])
        fields = msgspec.convert(values | query, kind, strict=not texts)
    except msgspec.ValidationError as error:
        raise _refused(error, kind) from None
    return msgspec.json.encode(fields)


def _refused(error: msgspec.DecodeError, kind: type[ControlFields]) -> ApiError:
    """The 400 for fields that are not those of a verb: it names the field, and what it takes."""
    said = str(error)
    if named := _NAMED.fullmatch(said):
        wrong, inside, name = named[1], named[3], named[2]
        path = name if inside is None else f"{inside}.{name}"
        if wrong == "missing required":
            return bad_request(f"{path} is missing", path)
        return bad_request(f"unknown field {name!r}: leave it out", path, "unknown_field")
    what, _, path = said.removesuffix("`").partition(" - at `$.")
    takes = get_args(get_type_hints(kind).get(path))
    texts = [one for group in takes for one in (get_args(group) or (group,))]
    known = ", ".join(one for one in texts if isinstance(one, str))
    remedy = f": use one of {known}" if known else ""
    return bad_request(f"{path}: {what}{remedy}" if path else what, path or None)


def read_fields(verb: str, body: bytes) -> ControlFields:
    """The fields of a verb, of which `body` is the JSON. Raises ApiError."""
    if verb not in FIELDS:
        raise ApiError(404, f"this engine has no verb {verb[:40]!r}", code="not_found")
    try:
        fields = msgspec.json.decode(body, type=FIELDS[verb])
    except msgspec.DecodeError as error:
        raise _refused(error, FIELDS[verb]) from None
    for field in _NAMES:
        name = getattr(fields, field, None)
        if name is not None and not 0 < len(name) <= MAX_NAME_CHARACTERS:
            problem = f"{field} has {len(name)} characters: give it 1 to {MAX_NAME_CHARACTERS}"
            raise bad_request(problem, field)
        if name is not None and not name.isprintable():
            raise bad_request(f"{field} is {name!r}: use characters that can be printed", field)
    return fields
