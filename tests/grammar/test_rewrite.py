"""Schemas as people and pydantic write them: followed, or refused at once with place and remedy."""

import json
import time
from contextlib import suppress

import pytest

from tests.grammar.grammar_walks import allows, compiled, walk
from tpdet.errors import RequestError
from tpdet.grammar.byte_texts import byte_vocabulary
from tpdet.grammar.compile import compile_form
from tpdet.grammar.rewrite import rewritten
from tpdet.requests.answer_form import AnswerForm

jsonschema = pytest.importorskip("jsonschema")
ID = 653247040368672769
CLOSED = {"type": "object", "additionalProperties": False}
SCORE = {"type": "integer", "minimum": 0, "maximum": 9}


def kinds(*names: str, required: bool = True, **more) -> dict:
    """Objects with a kind each, as pydantic's models; a kind may have a default instead."""
    return {
        name: CLOSED
        | {
            "properties": {"kind": {"const": name, "type": "string"}, "x": {"type": "null"}},
            "required": ["kind", "x"] if required else ["x"],
        }
        | more
        for name in names
    }


def union(**definitions) -> dict:
    branches = [{"$ref": f"#/$defs/{name}"} for name in definitions]
    return {"$defs": definitions, "oneOf": branches}


FOLLOWED = {
    "refs": union(**kinds("a", "b", "c")),
    "defaults": union(**kinds("a", "b", required=False))
    | {"discriminator": {"propertyName": "kind"}},
    "open objects": union(**kinds("a", "b", additionalProperties=True, required=False)),
    "in a list": {"type": "array", "maxItems": 1, "items": union(**kinds("a"))["oneOf"][0]}
    | {"$defs": kinds("a")},
    "enum and const": union(
        a={"enum": ["x", 1, True]}, b={"const": "y"}, c={"type": "object"}, d={"type": "null"}
    ),
    "number and list": union(a={"type": "integer"}, b={"type": "array", "items": {}}),
    "null beside a ref": union(a={"type": "object"}, b={"type": "null"}),
    "kinds by enum": union(
        a={
            "type": "object",
            "properties": {"t": {"$ref": "#/$defs/T"}},
            "required": ["t"],
            "additionalProperties": False,
        },
        b=CLOSED | {"properties": {"t": {"const": "z"}}, "required": ["t"]},
        T={"enum": ["x", "y"]},
    )
    | {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
    "recursive": union(
        leaf=CLOSED | {"properties": {"k": {"const": 0}}, "required": ["k"]},
        node=CLOSED
        | {"properties": {"k": {"const": 1}, "next": {"$ref": "#"}}, "required": ["k", "next"]},
    ),
    "all keys match": CLOSED
    | {"properties": {"score": SCORE}, "patternProperties": {"^score$": {"type": "integer"}}},
    "two keys match": CLOSED
    | {"properties": {"a": SCORE, "b": SCORE}, "patternProperties": {"^[ab]$": {"maximum": 5}}},
    "optional keys match": CLOSED
    | {"properties": {"ab": {}, "a": {}}, "patternProperties": {"^ab?$": {"type": "null"}}},
    "some keys match": CLOSED
    | {"properties": {"a": SCORE}, "patternProperties": {"^(a|b)$": {"type": "integer"}}},
    "counted": CLOSED | {"properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 1},
    "one key": {"type": "object", "additionalProperties": SCORE, "minProperties": 1},
    "named keys": {
        "type": "object",
        "additionalProperties": SCORE,
        "propertyNames": {"enum": ["a"]},
    },
    "patterned keys": {"type": "object", "propertyNames": {"pattern": "^[xy]{2}$"}},
    "text keys": {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 1},
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "uint64": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    "narrow": {"type": "integer", "exclusiveMinimum": ID, "maximum": ID + 300},
    "float": {"type": "number", "minimum": -1e308, "maximum": 1e308},
    "decimal": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    "cents": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$"},
    "price": {
        "type": "string",
        "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
    },
    **{
        name: {"type": "string", "format": name, "maxLength": 60}
        for name in ("uuid4", "uuid7", "path", "binary", "base64", "password", "xyz")
    },
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_every_answer_follows_the_schema_as_it_was_given(name):
    schema = FOLLOWED[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    start = compiled(schema)
    texts = [text for seed in range(25) if (text := walk(start, seed)) is not None]
    assert len(texts) > 2
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (FOLLOWED["defaults"], ['{"kind":"a","x":null}', '{"kind":"b","x":null}'], ['{"x":null}']),
        (FOLLOWED["all keys match"], ['{"score":3}', "{}"], ['{"score":3,', '{"score":12}']),
        (FOLLOWED["two keys match"], ['{"a":5,"b":1}', '{"b":1}'], ['{"a":6}', '{"a":5,"b":1,']),
        (FOLLOWED["some keys match"], ['{"a":5,"b":12}'], ['{"a":12}']),
        (FOLLOWED["named keys"], ["{}", '{"a":3}'], ['{"b":3}', '{"a":12}']),
        (FOLLOWED["patterned keys"], ["{}", '{"xy":[]}'], ['{"x":[]}', '{"abc":1}']),
        ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53), "7"]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, [str(2**53 + 2)], [str(2**53), "7"]),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, [str(-(2**53) - 2)], [str(-(2**53))]),
        ({"type": "integer", "maximum": 2**63 - 1}, [str(2**63 - 1)], [str(2**63)]),
        (FOLLOWED["int64"], ["-5", "0", str(2**62 + 1)], [str(2**63), str(-(2**63) - 1)]),
        (FOLLOWED["narrow"], [str(ID + 127), str(ID + 200)], [str(ID), str(ID + 301)]),
        (FOLLOWED["decimal"], ['"12.5"', '"-.5"', '"+7."', '"007"'], ['""', '"."', '"-"', '"1e5"']),
        (FOLLOWED["cents"], ['"12.55"', '"-.5"', '"8"'], ['"."', '"1.234"', '""']),
        (FOLLOWED["price"], ['"123.45"', '"-.5"', '"8"'], ['"1234"', '"1.234"', '"+"']),
        ({"const": 2**63 - 1}, [str(2**63 - 1)], []),
        ({"enum": [2**60, -(2**55)]}, [str(2**60), str(-(2**55))], [str(2**60 + 1)]),
        (
            {"type": "string", "format": "uuid4"},
            ['"6fa459ea-ee8a-4ca4-894e-db77e160355e"'],
            ['"6fa459ea-ee8a-3ca4-894e-db77e160355e"', '"x"'],
        ),
        ({"format": "int32"}, ["1", '"a"'], []),
        ({"type": "string", "format": "file-path", "maxLength": 2}, ['"/x"'], ['"/xy"']),
    ],
)
def test_what_is_inside_and_what_is_outside(schema, inside, outside):
    assert all(allows(schema, text) for text in inside)
    assert not any(allows(schema, text) for text in outside)


def at(place: str, what: str) -> str:
    return f"{place} {what}"


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"const": ID}, at("#/properties/v/const", f"has {ID}, past 2^53")),
        ({"enum": [1, {"a": [ID]}]}, at("#/properties/v/enum", f"has {ID}, past 2^53")),
        ({"const": 12345678901234567890}, "make it a string"),
        ({"const": 1e308}, "has 1e+308, past 2^53"),
        ({"const": -(2**63)}, "past 2^53"),
        ({"type": "integer", "minimum": 2**63}, "#/properties/v/minimum is 9223372036854775808"),
        ({"type": "array", "uniqueItems": True}, at("#/properties/v/uniqueItems", "is not supp")),
        ({"anyOf": [{"contains": {}}]}, "#/properties/v/anyOf/0/contains is not supported: name"),
        ({"not": {}}, "#/properties/v/not is not supported: list what is allowed"),
        ({"if": {}, "then": {}}, "#/properties/v/if is not supported: write the cases as anyOf"),
        ({"propertyNames": {"maxLength": 3}}, "#/properties/v/propertyNames is not supported"),
        (
            {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
            "#/properties/v/oneOf is not supported: its branches cannot be told apart",
        ),
        (
            {"type": "object", "minProperties": 2},
            "#/properties/v/minProperties is 2: keys may repeat",
        ),
        (
            CLOSED | {"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
            "#/properties/v/minProperties is not supported: it is followed only where all keys",
        ),
        (
            {"type": "string", "pattern": "(?<!a)b"},
            "#/properties/v/pattern '(?<!a)b' is not supported: look-around",
        ),
        ({"type": "string", "pattern": r"(a)\1"}, "backreferences are not supported"),
        ({"patternProperties": {"(?=a)": {}}}, "#/properties/v/patternProperties '(?=a)' is not"),
        ({"type": ["integer", "null"], "maximum": -(2**64)}, "#/properties/v/maximum is -"),
        (
            {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=x)\d*)$"},
            "look-around, including look-ahead and look-behind, is not supported",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_place_and_a_remedy(inner, message):
    schema = {"type": "object", "properties": {"v": inner}, "required": ["v"]}
    with pytest.raises(RequestError) as refused:
        compiled(schema)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300 and refused.value.param == "response_format"


def test_deep_schemas_are_refused():
    schema: dict = {}
    for _ in range(900):
        schema = {"not": schema}
    with pytest.raises(RequestError):
        compiled(schema)


BRANCH = {"type": "object", "properties": {"k": {"const": 1}}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"type":"integer","minimum":1e400}', "the number 1e400, which is not finite"),
        ('{"type":"integer","exclusiveMaximum":-1e400}', "the number -1e400, which is not"),
        ('{"type":"number","maximum":NaN}', "the number NaN, which is not finite"),
        ('{"const":%s}' % ("9" * 4000), "#/const has 99999999999999999999 ... 999"),
        ('{"type":"integer","minimum":%s}' % ("9" * 4000), "... 99999999999999999999: integers"),
        ('{"type":null,"format":"x"}', "type must be a string or array of strings"),
        ('{"propertyNames":{"format":[]}}', "#/propertyNames is not supported"),
        (json.dumps({"oneOf": [BRANCH, BRANCH | {"required": None}]}), "'required', got null"),
        (
            json.dumps({"oneOf": [BRANCH | {"required": 5}, union(**kinds("a"))["$defs"]["a"]]}),
            "Expected array for 'required', got 5",
        ),
        (
            '{"type":"string","pattern":"^(?!^[-+.]*$)[+-]?0*\\\\d*\\\\.?\\\\d{0,%s}0*$"}'
            % ("9" * 4400),
            "look-around",
        ),
    ],
)
def test_malformed_schemas_are_refused_in_one_short_line(text, message):
    with pytest.raises(RequestError) as refused:
        compile_form(AnswerForm("json_schema", text), byte_vocabulary())
    assert message in str(refused.value)
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


def seconds(schema: dict) -> float:
    """Processor seconds of `rewritten`, which are the model's too; a refusal counts."""
    before = time.process_time()
    with suppress(RequestError):
        rewritten(schema)
    return time.process_time() - before


@pytest.mark.alone
@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": [*range(4000)]}, {"enum": [*range(4000, 8000)]}]},
        {"oneOf": [{"enum": [f"{j}-{i}" for i in range(25)]} for j in range(256)]},
        {
            "$defs": {
                f"d{i}": BRANCH | {"properties": {key: {"enum": ["x", i]} for key in "abcdefgh"}}
                for i in range(250)
            },
            "properties": {
                f"p{j}": {"oneOf": [{"$ref": f"#/$defs/d{i}"} for i in range(250)]}
                for j in range(6)
            },
        },
        {
            "properties": {
                f"o{j}": CLOSED
                | {
                    "properties": {f"{a}{b}": {} for a in "abcdefghij" for b in "abcdefgh"},
                    "patternProperties": {f"^[a-j][a-h]?{i}?$": {} for i in range(30)},
                }
                for j in range(30)
            }
        },
    ],
    ids=["two long lists", "256 lists", "unions of the same", "patterns of keys"],
)
def test_no_schema_takes_the_model_long_to_rewrite(schema):
    assert len(json.dumps(schema)) < 1 << 17
    assert seconds(schema) < 1.0


def test_equal_values_of_json_tell_no_branches_apart():
    one = {"oneOf": [{"enum": [1, [True]]}, {"enum": [1.0]}]}
    assert "oneOf" in rewritten(one)
    other = {"oneOf": [{"enum": [1, [True], {"a": 0}]}, {"enum": [True, [1], {"a": False}]}]}
    assert "anyOf" in rewritten(other)
