"""Pydantic's types: an answer is one to the schema and to pydantic, or the schema is refused.

`FREE` are types of which the schema that pydantic writes says less than pydantic asks.
"""

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from tests.grammar.grammar_walks import compiled, walk
from tpdet.errors import RequestError

jsonschema = pytest.importorskip("jsonschema")


class Colour(Enum):
    """Texts."""

    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    """Numbers."""

    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    """Its kind is required."""

    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    """Its kind is required."""

    kind: Literal["dog"]
    good: bool


class Red(BaseModel):
    """Its kind has a default, as most people write it."""

    kind: Literal["red"] = "red"
    x: None


class Blue(BaseModel):
    """Its kind has a default."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["blue", "navy"] = "blue"
    x: None


class Node(BaseModel):
    """Refers to itself."""

    value: int
    next: "Node | None" = None


class Optional(BaseModel):
    """All fields may be left out."""

    model_config = ConfigDict(extra="forbid")
    a: int = 3
    b: str | None = None
    c: Colour = Colour.RED


Animal = Annotated[Cat | Dog, Field(discriminator="kind")]
Shade = Annotated[Red | Blue, Field(discriminator="kind")]
FOLLOWED = {
    "int": int, "float": float, "str": str, "bool": bool, "None": None, "any": Any,
    "optional": int | None, "union": int | str | list[bool],
    "literal": Literal["a", 1, True, None], "enum": Colour, "int enum": Level,
    "list": list[int], "tuple": tuple[int, str, bool], "open tuple": tuple[int, ...],
    "dict": dict[str, int], "keys of literals": dict[Literal["a", "b"], int],
    "keys of an enum": dict[Colour, int], "keys of uuids": dict[UUID, int],
    "one key at least": Annotated[dict[str, int], Field(min_length=1)],
    "date": date, "uuid": UUID, "uuid1": pydantic.UUID1, "uuid3": pydantic.UUID3,
    "uuid4": pydantic.UUID4, "uuid5": pydantic.UUID5, "path": Path, "secret": pydantic.SecretStr,
    "bytes": bytes, "base64": pydantic.Base64Bytes,
    "ipv4": IPv4Address, "ipv6": IPv6Address, "url": pydantic.AnyUrl,
    "between": Annotated[int, Field(gt=3, le=10)], "sevens": Annotated[int, Field(multiple_of=7)],
    "share": Annotated[float, Field(gt=0, lt=1)], "positive": pydantic.PositiveInt,
    "int64": Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    "large float": Annotated[float, Field(ge=-1e308, le=1e308)],
    "pattern": Annotated[str, Field(pattern="^[a-z]+$", max_length=5)],
    "length": Annotated[str, Field(min_length=2, max_length=3)],
    "short list": Annotated[list[int], Field(min_length=1, max_length=2)],
    "recursive": Node, "defaults": Optional, "animal": Animal, "shade": Shade,
    "shades": Annotated[list[Shade], Field(max_length=1)], "models": Cat | Dog,
    "shade or none": Shade | None,
}  # fmt: skip
FREE = {
    "decimal": Decimal, "cents": Annotated[Decimal, Field(max_digits=5, decimal_places=2)],
    "network": IPv4Network, "base64 text": pydantic.Base64Str, "file": pydantic.FilePath,
    "JSON": pydantic.Json,
    "datetime": datetime, "time": time, "timedelta": timedelta, "past": pydantic.PastDate,
    "keys of ints": dict[int, int], "http": pydantic.HttpUrl,
}  # fmt: skip
REFUSED = {
    "set": (set[int], "#/uniqueItems is not supported"),
    "frozenset": (frozenset[str], "#/uniqueItems is not supported"),
    "two keys at least": (Annotated[dict[str, int], Field(min_length=2)], "#/minProperties is 2"),
}


def answers(schema: dict, count: int) -> list[bytes]:
    start = compiled(schema)
    found = [text for seed in range(count) if (text := walk(start, seed)) is not None]
    assert found
    for text in found:
        jsonschema.validate(json.loads(text), schema)
    return found


@pytest.mark.parametrize("name", FOLLOWED)
def test_an_answer_is_one_to_the_schema_and_to_pydantic(name):
    adapter = TypeAdapter(FOLLOWED[name])
    for text in answers(adapter.json_schema(), 12):
        adapter.validate_json(text)


@pytest.mark.parametrize("name", FREE)
def test_where_the_schema_says_less_an_answer_is_one_to_the_schema(name):
    answers(TypeAdapter(FREE[name]).json_schema(), 8)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_its_keyword(name):
    kind, message = REFUSED[name]
    with pytest.raises(RequestError, match=message):
        compiled(TypeAdapter(kind).json_schema())
