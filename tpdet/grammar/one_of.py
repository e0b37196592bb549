"""`oneOf` as `anyOf`, where no value can follow two of its branches."""

from itertools import combinations
from typing import Any

from tpdet.grammar.places import Schema, resolved

_NOTES = {"$ref", "title", "description", "$comment", "examples", "deprecated", "default"}
_MOST = 256  # branches: they are compared in pairs
_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))


def as_any_of(root: Schema, schema: Schema) -> bool:
    """Turn `oneOf` in `schema` into `anyOf`; whether that could be done.

    A property that each branch has with a value of its own (`const`, `enum`) tells objects apart.
    Where it may be left out, as in pydantic's unions with defaults, it becomes required: so each
    answer follows one branch, as `oneOf` asks.
    """
    branches = [_branch(root, one) for one in schema["oneOf"]]
    if "anyOf" in schema or len(branches) > _MOST or any(branch is None for branch in branches):
        return False
    found = [branch for branch in branches if branch is not None]
    required: list[set[str]] = [set() for _ in found]
    for (i, one), (j, other) in combinations(enumerate(found), 2):
        if _types(one).isdisjoint(_types(other)) or _values_differ(one, other):
            continue
        name = _telling(root, schema, one, other)
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


def _branch(root: Schema, schema: Any) -> Schema | None:
    """A branch with its references followed; None where more than notes stands beside one."""
    if isinstance(schema, dict) and "$ref" in schema and not schema.keys() <= _NOTES:
        return None
    found = resolved(root, schema)
    return found if isinstance(found, dict) else None


def _requiring(given: Schema, branch: Schema, names: set[str]) -> Schema:
    """The branch with these properties required; as it was given where they are."""
    have = branch.get("required", [])
    more = sorted(names - {*have})
    return {**branch, "required": [*have, *more]} if more else given


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


def _values(schema: Any) -> list[Any] | None:
    """The values that a schema lists."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else None


def _values_differ(one: Any, other: Any) -> bool:
    """Whether both list their values and have none in common; 1 and true are two values."""
    first, second = _values(one), _values(other)
    if first is None or second is None:
        return False
    return not any(_type_of(a) == _type_of(b) and a == b for a in first for b in second)


def _telling(root: Schema, around: Schema, one: Schema, other: Schema) -> str | None:
    """A property whose values tell two objects apart; that of `discriminator` first."""
    if _types(one) != {"object"} or _types(other) != {"object"}:
        return None
    first, second = one.get("properties"), other.get("properties")
    if not isinstance(first, dict) or not isinstance(second, dict):
        return None
    given = around.get("discriminator")
    named = given.get("propertyName") if isinstance(given, dict) else None
    always = {*one.get("required", ())} & {*other.get("required", ())}
    names = sorted(first.keys() & second.keys(), key=lambda n: (n != named, n not in always, n))
    for name in names:
        if _values_differ(resolved(root, first[name]), resolved(root, second[name])):
            return str(name)
    return None
