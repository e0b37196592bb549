"""`StructuredOutputsParams`: the form of an answer, by vLLM's names."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from tpdet.arguments.suggestions import did_you_mean
from tpdet.errors import RequestError
from tpdet.requests.answer_form import AnswerForm, regex_of_choice

FIELD = "structured_outputs"
OLDER = ("json", "regex", "choice")  # behind "guided_" names of the fields of older versions
_KINDS = (*OLDER, "json_object")
# What is no form: the values that change nothing, and what to do about others.
_OTHERS: dict[str, tuple[tuple[object, ...], str]] = {
    "grammar": ((), "give json, regex or choice"),
    "structural_tag": ((), "give json, regex or choice"),
    "whitespace_pattern": (
        (),
        'JSON has no blanks unless the schema has "x-guidance": {"whitespace_flexible": true}',
    ),
    "disable_additional_properties": (
        (False,),
        'write "additionalProperties": false into the schema',
    ),
    "disable_any_whitespace": ((True, False), "it is True or False"),
    "disable_fallback": ((True, False), "it is True or False"),
    "backend": (("auto", "guidance"), "llguidance is the only one: leave it out"),
}


class _Named(msgspec.StructMeta):
    """What a call does before the struct is made: every name has to be known."""

    def __call__(cls, *values: Any, **given: Any) -> Any:
        for name in given.keys() - {*cls.__struct_fields__}:
            hint = did_you_mean(name, cls.__struct_fields__) or ": leave it out"
            raise RequestError(f"{FIELD} has no {name!r}{hint}", FIELD)
        return super().__call__(*values, **given)


class StructuredOutputsParams(msgspec.Struct, frozen=True, metaclass=_Named):
    """The form of an answer; one of the first four is given. Names and meanings are vLLM's.

    json: a JSON schema as text or as an object; or a class of pydantic's, for its schema.
    regex: a regular expression (Rust's syntax) that the whole answer matches.
    choice: texts of which the answer is one.
    json_object: True for any JSON object.
    disable_any_whitespace, disable_fallback: they make no difference. JSON is compact unless the
        schema says otherwise ("x-guidance": {"whitespace_flexible": true}).
    backend: "auto" or "guidance", the one that there is.

    The other parameters are refused, unless their values ask for nothing. Raises RequestError.
    """

    json: Any = None
    regex: str | None = None
    choice: Any = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        for name, (values, remedy) in _OTHERS.items():
            value = getattr(self, name)
            if value is not None and not any(value is v or value == v for v in values):
                raise RequestError(f"{FIELD}.{name} {value!r} is not supported: {remedy}", FIELD)
        _ = self.form

    @property
    def form(self) -> AnswerForm | None:
        """The form, None where none is asked for. Raises RequestError for several, or a wrong."""
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise RequestError(f"{FIELD} has {' and '.join(given)}: give one of them", FIELD)
        if not given:
            return None
        make = {
            "json": lambda: AnswerForm("json_schema", _schema(self.json)),
            "json_object": lambda: AnswerForm("json_schema", _any_object(self.json_object)),
            "regex": lambda: AnswerForm("regex", _regex(self.regex)),
            "choice": lambda: AnswerForm("regex", regex_of_choice(_choice(self.choice))),
        }
        return make[given[0]]()


def form_of(value: object) -> AnswerForm | None:
    """The form of a StructuredOutputsParams, or of an object with its names."""
    if isinstance(value, Mapping):
        value = StructuredOutputsParams(**{str(name): each for name, each in value.items()})
    if not isinstance(value, StructuredOutputsParams):
        raise RequestError(
            f"{FIELD} is {value!r}: give StructuredOutputsParams or an object, such as "
            '{"regex": "[0-9]+"}',
            FIELD,
        )
    return value.form


def form_in(body: Mapping[str, Any]) -> AnswerForm | None:
    """The form that a body asks for by vLLM's names, the older ones among them."""
    given = body.get(FIELD) or {}
    if not isinstance(given, Mapping):
        raise RequestError(f"{FIELD} must be an object, not {given!r}", FIELD)
    old = {kind: body[f"guided_{kind}"] for kind in OLDER if body.get(f"guided_{kind}") is not None}
    if given and old:
        raise RequestError(f"{FIELD} and guided_{next(iter(old))}: give one of them", FIELD)
    return form_of(given or old)


def take_form(given: dict[str, Any]) -> dict[str, Any]:
    """Parameters of `SamplingParams`, those of vLLM's for a form as `json_schema` or `regex`."""
    names = [name for name in (FIELD, "guided_decoding") if name in given]
    forms = [form_of(given[name]) for name in names if given[name] is not None]
    others = [name for name in ("json_schema", "regex") if given.get(name) is not None]
    rest = {name: value for name, value in given.items() if name not in names}
    found = [form for form in forms if form is not None]
    if len(found) + len(others) > 1:
        raise RequestError(
            f"an answer has one form: give one of {', '.join([*names, *others])}", names[0]
        )
    return rest | {form.kind: form.text for form in found}


def schema_text(schema: Any) -> str:
    """A schema as compact JSON text, its keys in the order given."""
    return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _schema(value: Any) -> str:
    if isinstance(value, str):
        return value
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if not isinstance(value, Mapping):
        raise RequestError(f"{FIELD}.json must be a JSON schema, not {value!r}", FIELD)
    try:
        return schema_text(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{FIELD}.json is not JSON: {error}", FIELD) from None


def _any_object(value: object) -> str:
    if value is not True:
        raise RequestError(f"{FIELD}.json_object must be true or false, not {value!r}", FIELD)
    return '{"type":"object"}'


def _regex(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{FIELD}.regex must be a text that is not empty", FIELD)
    return value


def _choice(value: object) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, list | tuple) else ()
    if not any(texts) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{FIELD}.choice must be a list of texts, not {value!r}", FIELD)
    return texts
