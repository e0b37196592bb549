"""The verbs of the control routes, and the fields of each; the values are JSON's, or a query's.

Names and defaults follow vLLM's routes and, where SGLang has a route of another name, SGLang's.
"""

from typing import Any, Literal

import msgspec

from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.server.wire.weight_fields import WEIGHT_FIELDS, ControlFields

__all__ = ["ControlFields", "fields_of", "read_fields"]

MAX_NAME_CHARACTERS = 256
_NAMES = ("new_version", "weight_version")
"""Fields that say what weights are called."""


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
        raise bad_request(str(error)) from None
    return msgspec.json.encode(fields)


def read_fields(verb: str, body: bytes) -> ControlFields:
    """The fields of a verb, of which `body` is the JSON. Raises ApiError."""
    if verb not in FIELDS:
        raise ApiError(404, f"this engine has no verb {verb[:40]!r}", code="not_found")
    try:
        fields = msgspec.json.decode(body, type=FIELDS[verb])
    except msgspec.DecodeError as error:
        raise bad_request(str(error)) from None
    for field in _NAMES:
        name = getattr(fields, field, None)
        if name is not None and not 0 < len(name) <= MAX_NAME_CHARACTERS:
            problem = f"{field} has {len(name)} characters: give it 1 to {MAX_NAME_CHARACTERS}"
            raise bad_request(problem, field)
        if name is not None and not name.isprintable():
            raise bad_request(f"{field} is {name!r}: use characters that can be printed", field)
    return fields
