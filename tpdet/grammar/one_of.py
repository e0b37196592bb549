"""`oneOf` as `anyOf`, where no value can follow two of its branches."""

from itertools import combinations
from typing import Any, NamedTuple

from tpdet.grammar.places import Schema, resolved

_NOTES = {"$ref", "title", "description", "$comment", "examples", "deprecated", "default"}
_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))


def as_any_of(root: Schema, schema: Schema) -> bool:
    """Turn `oneOf` in `schema` into `anyOf`; whether that could be done.

    A property that each branch has with a value of its own (`const`, `enum`) tells objects apart.
    Where it may be left out, as in pydantic's unions with defaults, it becomes required: so each
    answer follows one branch, as `oneOf` asks.
    """
    branches = [_branch(root, one) for one in schema["oneOf"]]
    if "anyOf" in schema or any(branch is None for branch in branches):
        return False
    found = [branch for branch in branches if branch is not None]
    looks = [_Look.at(root, branch) for branch in found]
    required: list[set[str]] = [set() for _ in found]
    for (i, one), (j, other) in combinations(enumerate(looks), 2):
        if one.types.isdisjoint(other.types) or _differ(one.values, other.values):
            continue
        name = _telling(_named(schema), one, other)
        if name is None:
            return False
        required[i].add(name)
        required[j].add(name)
    schema["anyOf"] = [
        _requiring(given, branch, names)
        for given, branch, names in zip(schema.pop("oneOf"), found, required, strict=True)
    ]
    schema.pop("discriminator", None)
    return True


class _Look(NamedTuple):
    """What tells a branch from others: types, values, what is required, and values by property."""

    types: frozenset[str]
    values: frozenset[Any] | None
    required: frozenset[str]
    listed: dict[str, frozenset[Any]]

    @classmethod
    def at(cls, root: Schema, branch: Schema) -> "_Look":
        """Look at a branch."""
        given = branch.get("properties")
        properties = given if isinstance(given, dict) else {}
        values = {name: _values(resolved(root, one)) for name, one in properties.items()}
        return cls(
            _types(branch),
            _values(branch),
            frozenset(_texts(branch.get("required")) or ()),
            {name: found for name, found in values.items() if found is not None},
        )


def _branch(root: Schema, schema: Any) -> Schema | None:
    """A branch with its references followed; None where more than notes stands beside one."""
    if isinstance(schema, dict) and "$ref" in schema and not schema.keys() <= _NOTES:
        return None
    found = resolved(root, schema)
    return found if isinstance(found, dict) else None


def _requiring(given: Schema, branch: Schema, names: set[str]) -> Schema:
    """The branch with these properties required; as it was given where they are."""
    have = _texts(branch.get("required", []))
    more = sorted(names.difference(have or ()))
    if not more or have is None:  # what is no list of texts, the library refuses
        return given
    return {**branch, "required": [*have, *more]}


def _texts(value: Any) -> list[str] | None:
    """A list of texts; None for any other value."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    return None


def _types(schema: Schema) -> frozenset[str]:
    """The types that a value may have; all of them where the schema does not say."""
    if "const" in schema:
        return frozenset((_type_of(schema["const"]),))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type_of, schema["enum"]))
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return _TYPES
    return frozenset("number" if name == "integer" else str(name) for name in names)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {dict: "object", list: "array", str: "string", int: "number", float: "number"}
    return kinds.get(type(value), "null")


def _values(schema: Any) -> frozenset[Any] | None:
    """The values that a schema lists."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return frozenset((_frozen(schema["const"]),))
    found = schema.get("enum")
    return frozenset(map(_frozen, found)) if isinstance(found, list) else None


def _frozen(value: Any) -> Any:
    """A JSON value as one to look up; 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        value = frozenset((key, _frozen(one)) for key, one in value.items())
    elif isinstance(value, list):
        value = tuple(map(_frozen, value))
    return type(value) is bool, value


def _differ(one: frozenset[Any] | None, other: frozenset[Any] | None) -> bool:
    """Whether both have values listed and none in common."""
    return one is not None and other is not None and one.isdisjoint(other)


def _named(schema: Schema) -> Any:
    """The property that `discriminator` names."""
    given = schema.get("discriminator")
    return given.get("propertyName") if isinstance(given, dict) else None


def _telling(named: Any, one: _Look, other: _Look) -> str | None:
    """A property whose values tell two objects apart; `named` first, then those required."""
    if one.types != {"object"} or other.types != {"object"}:
        return None
    always = one.required & other.required
    names = sorted(one.listed.keys() & other.listed.keys())
    names.sort(key=lambda name: (name != named, name not in always))
    return next((name for name in names if _differ(one.listed[name], other.listed[name])), None)
