"""Validates a parsed JSON object as one of the schema's bodies; reports the first error."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from tpdet.arguments.suggestions import did_you_mean
from tpdet.requests.body.problems import ApiError, bad_request
from tpdet.requests.body.responses_body import ResponsesBody
from tpdet.requests.body.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TextPart,
    TokenizeBody,
)
from tpdet.requests.body.sglang_body import SglangBody
from tpdet.requests.body.token_bodies import TokensBody
from tpdet.requests.field_ranges import MAX_LOGIT_BIAS_IDS, MIN_TEMPERATURE
from tpdet.requests.routes import Route, path_of
from tpdet.text.chat_messages import refuse_other_parts

BODIES: dict[Route, type[Body]] = {
    "completion": CompletionBody,
    "chat": ChatBody,
    "tokens": TokensBody,
    "responses": ResponsesBody,
    "sglang": SglangBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
"""The bodies that hold their fields as they are; `work.BODIES` has the others too."""
# What to do about a value out of range, where the range alone does not say it.
_REMEDIES = {
    "max_tokens": "leave it out, and a chat may go on to the end of the context",
    "max_completion_tokens": "leave it out, and a chat may go on to the end of the context",
    "seed": "leave it out, and the server draws one",
    "top_p": "to take the likeliest token set temperature to 0",
    "logprobs": "the likeliest few stand for all ids of the vocabulary",
    "top_logprobs": "the likeliest few stand for all ids of the vocabulary",
    "prompt_logprobs": "the likeliest few stand for all ids of the vocabulary",
}

_SCHEMA = 'send {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
# What other engines' types of `response_format` are called here.
_FORMS = {
    "json": _SCHEMA,
    "regex": 'send structured_outputs {"regex": ...} beside the other fields',
    "choice": 'send structured_outputs {"choice": [...]} beside the other fields',
}

_NAMED_MODEL = re.compile(r" or instance of \w+")
_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than_equal")

Parsed = TypeVar("Parsed", bound=Body)


def parse_body(model: type[Parsed], body: dict[str, Any]) -> Parsed:
    """The body as its model. Raises ApiError 400, or RequestError, naming the first wrong field."""
    if "response_format" in model.model_fields:
        _refuse_other_format(body.get("response_format"))
    given = _known(model, body)
    bias = given.get("logit_bias")
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS_IDS:
        raise bad_request(
            f"logit_bias has {len(bias)} ids; the limit is {MAX_LOGIT_BIAS_IDS}", "logit_bias"
        )
    for sampling in (given, given.get("sampling_params")):
        if isinstance(sampling, dict):
            _drop_idle_filter(sampling)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _first_problem(error) from None


def parse_part(model: type[Parsed], value: Any, place: str) -> Parsed:
    """An object inside a body, at `place`, as its model. Raises ApiError 400 as `parse_body`."""
    if not isinstance(value, dict):
        raise bad_request(f"{place} must be an object", place)
    try:
        return model.model_validate(_known(model, value, place))
    except ValidationError as error:
        raise _first_problem(error, place) from None


def _known(model: type[Body], body: dict[str, Any], place: str = "") -> dict[str, Any]:
    """The fields that ask for something, each of them known, in the objects inside too.

    Pydantic would list every unknown one. `place`: of an object inside the body, for messages.
    """
    given, inner = {}, _bodies_in(model)
    for name, value in body.items():
        where = f"{place}.{name}" if place else name
        if name in inner:
            if value is not None:
                given[name] = _known_inside(inner[name], value, where)
        elif name in model.readings:
            continue
        elif name not in model.idle:
            raise _unknown(model, name, place)
        elif value is not None and not model.idle[name].accepts(value):
            shown = _shown(value)
            raise bad_request(
                f"{where}{' ' + shown if shown else ''} is not supported: "
                f"{model.idle[name].reason}",
                place or name,
                "not_supported",
            )
    return given


def _known_inside(model: type[Body] | None, value: Any, place: str) -> Any:
    """As `_known` of an object, or of each in a list; any other value stays as it is."""
    if model is not None and isinstance(value, dict):
        return _known(model, value, place)
    if model is None or not isinstance(value, list):
        return value
    if model is TextPart:
        refuse_other_parts(place, value)
    return [_known_inside(model, one, f"{place}[{index}]") for index, one in enumerate(value)]


@cache
def _bodies_in(model: type[Body]) -> dict[str, type[Body] | None]:
    """The fields of a body by their names in JSON: the body of objects in each, None for others."""
    fields = model.model_fields.items()
    return {field.alias or name: next(_bodies(field.annotation), None) for name, field in fields}


def _bodies(kind: Any) -> Iterator[type[Body]]:
    if isinstance(kind, type) and issubclass(kind, Body):
        yield kind
    for inner in get_args(kind):
        yield from _bodies(inner)


def _refuse_other_format(response_format: object) -> None:
    """Refuse types of a `response_format` that other engines have, whatever stands beside them."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if not isinstance(kind, str) or kind in ("text", "json_object", "json_schema"):
        return
    remedy = _FORMS.get(kind, "json_schema, json_object and text are")
    raise bad_request(
        f"response_format.type {kind[:60]!r} is not supported: {remedy}",
        "response_format",
        "not_supported",
    )


def _drop_idle_filter(sampling: dict[str, Any]) -> None:
    """Take out a `top_p` of 0 beside a temperature of 0: greedy choice has no filter."""
    temperature: Any = sampling.get("temperature")
    top_p = sampling.get("top_p")
    numbers = {type(temperature), type(top_p)} <= {int, float}
    if numbers and top_p == 0 <= temperature < MIN_TEMPERATURE:
        del sampling["top_p"]


def _first_problem(error: ValidationError, inside: str = "") -> ApiError:
    """The first error; inside: the place in the body of what was validated."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = [part for part in problem["loc"] if not _is_branch(part)]
    param = inside or (str(place[0]) if place else None)
    if problem["type"] == "extra_forbidden":
        return _extra(_path(problem["loc"]))
    where = f"{inside}.{_path(place)}" if inside else _path(place)
    if problem["type"] == "missing":
        return bad_request(f"{where} is missing", param)
    shown = _shown(problem["input"])
    remedy = _REMEDIES.get(where) if problem["type"] in _OUT_OF_RANGE else None
    return bad_request(
        f"{where}: {_NAMED_MODEL.sub('', problem['msg'])}"
        + (f", not {shown}" if shown else "")
        + (f": {remedy}" if remedy else ""),
        param,
    )


def _path(place: Iterable[int | str]) -> str:
    """A place as a client writes it: messages[0].content."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]


def _is_branch(part: int | str) -> bool:
    """Whether a location names a branch of a union rather than a field."""
    return isinstance(part, str) and ("[" in part or part in ("str", "TextPart"))


def _shown(value: object) -> str:
    """A scalar as it stood in the JSON, shortened; nothing for a list or an object."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)[:40] if not isinstance(value, int) or value.bit_length() < 200 else ""
    return repr(value)[:60] if isinstance(value, str) else ""


def _unknown(model: type[Body], name: str, place: str) -> ApiError:
    """A field that this body does not have: where it belongs, or the nearest that there is."""
    others = [route for route, body in BODIES.items() if not place and name in body.model_fields]
    if others and model in BODIES.values():
        return _extra(name, f": it is a field of {path_of(others[0])}")
    hint = did_you_mean(name, [*model.model_fields, *model.idle])
    return _extra(f"{place}.{name}" if place else name, hint)


def _extra(name: str, hint: str = "") -> ApiError:
    return bad_request(f"unknown field {name!r}{hint or ': leave it out'}", name, "unknown_field")
