"""The form of an answer by vLLM's names: each is one schema or one regular expression."""

import json

import pydantic
import pytest

import tpdet
from tpdet import SamplingParams, StructuredOutputsParams
from tpdet.errors import RequestError

SCHEMA = {"type": "object", "properties": {"é": {"const": 12345678901234567890}}}
TEXT = '{"type":"object","properties":{"é":{"const":12345678901234567890}}}'


class Person(pydantic.BaseModel):
    """What pydantic users give as it is."""

    name: str


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"json": SCHEMA}, {"json_schema": TEXT}),
        ({"json": TEXT + " "}, {"json_schema": TEXT + " "}),
        (
            {"json": Person},
            {"json_schema": json.dumps(Person.model_json_schema(), separators=(",", ":"))},
        ),
        ({"json_object": True}, {"json_schema": '{"type":"object"}'}),
        ({"regex": r"\d+|x"}, {"regex": r"\d+|x"}),
        ({"choice": ["yes", "n.o"]}, {"regex": r"yes|n\.o"}),
        ({"choice": ("a",), "disable_fallback": True}, {"regex": "a"}),
        ({"regex": "a", "disable_any_whitespace": True, "backend": "auto"}, {"regex": "a"}),
        ({"regex": "a", "json": None, "json_object": False, "grammar": None}, {"regex": "a"}),
        ({}, {}),
        ({"json": None}, {}),
    ],
)
def test_names_of_vllm_are_kept_as_schema_or_regex(given, kept):
    wanted = SamplingParams(**kept)
    for name in ("structured_outputs", "guided_decoding"):
        assert SamplingParams(**{name: given}) == wanted
        assert SamplingParams(**{name: StructuredOutputsParams(**given)}) == wanted
    assert (wanted.form is None) == (not kept)
    assert SamplingParams(structured_outputs=wanted.structured_outputs) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": SCHEMA, "regex": "a"}, "has json and regex: give one of them"),
        ({"grammar": "root ::= 'a'"}, "structured_outputs.grammar .* give json, regex or choice"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag"),
        ({"whitespace_pattern": " "}, "x-guidance"),
        ({"disable_additional_properties": True}, '"additionalProperties": false'),
        ({"backend": "outlines"}, "llguidance is the only one"),
        ({"choice": "yes"}, "choice must be a list of texts, not 'yes'"),
        ({"choice": [""]}, "choice must be a list of texts"),
        ({"choice": [1]}, "choice must be a list of texts"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"regex": 3}, "regex must be a text"),
        ({"regex": "\ud800"}, "half of a surrogate pair"),
        ({"json": 3}, "json must be a JSON schema, not 3"),
        ({"json": {"const": float("nan")}}, "json is not JSON"),
        ({"json": {"const": {1}}}, "json is not JSON"),
        ({"json_object": 1}, "json_object must be true or false, not 1"),
        ({"jsn": {}}, "has no 'jsn': did you mean 'json'?"),
        ({"zzz": {}}, "has no 'zzz': leave it out"),
        ({"regex": "a" * 70000}, "over the limit of 65536"),
    ],
)
def test_what_asks_for_something_else_is_refused_by_name(given, message):
    with pytest.raises(RequestError, match=message) as refused:
        SamplingParams(structured_outputs=given)
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": "{}", "regex": "a"},
        {"json_schema": "{}", "structured_outputs": {"regex": "a"}},
        {"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}},
    ],
)
def test_an_answer_has_one_form(given):
    with pytest.raises(RequestError, match="one form"):
        SamplingParams(**given)


def test_what_is_no_form_is_refused():
    with pytest.raises(RequestError, match="give StructuredOutputsParams or an object"):
        SamplingParams(structured_outputs="json")
    assert tpdet.StructuredOutputsParams is StructuredOutputsParams
    assert SamplingParams(structured_outputs=None, guided_decoding=None) == SamplingParams()
