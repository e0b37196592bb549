"""Reads the keys of a JSON object with type checks; each refusal names file, key and value.

The metadata of a GGUF file are read alike.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from tpdet.errors import CheckpointError

_Item = TypeVar("_Item")
MAX_INTEGER = 2**31 - 1
LEAST, MOST = 1e-12, 1e12
"""Sizes of a number that is not 0: far beyond every model's, and what is made of two fits fp32."""
_MOST_SHOWN = 64  # items of a list
_MOST_UNKNOWN = 6  # keys that a refusal shows


class Fields:
    """A JSON object of `file`, at `within` in it. A null value counts as absent.

    names: what the file itself calls keys that were renamed; complete: what to do where a key is
    missing.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        file: str,
        within: str = "",
        names: Mapping[str, str] = MappingProxyType({}),
        complete: str = "a complete config.json states it",
    ) -> None:
        self._values = values
        self._file = file
        self._within = f"{within}." if within else ""
        self._names = names
        self._complete = complete

    def holding(self, values: Mapping[str, Any]) -> "Fields":
        """Other values of the same place."""
        found = Fields(values, self._file, "", self._names, self._complete)
        found._within = self._within
        return found

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def has_null(self, key: str) -> bool:
        """Whether the key is present with the value null; some settings tell that from absent."""
        return key in self._values and self._values[key] is None

    def raw(self, key: str) -> Any:
        """The value as parsed, None if absent."""
        return self._values.get(key)

    def inner(self, key: str) -> "Fields | None":
        """The object under a key, None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, "it must be an object")
        return Fields(value, self._file, f"{self._within}{key}")

    def integer(
        self, key: str, default: int | None = None, low: int = 1, high: int = MAX_INTEGER
    ) -> int:
        """An integer in [low, high]; `default` where absent, refused if that is None."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, "it must be an integer")
        if not low <= value <= high:
            self.refuse(key, f"it must lie in [{low}, {high}]")
        return value

    def same_integer(self, key: str, remedy: str) -> int:
        """An integer above 0, or the one that a list repeats; `remedy` is for lists that vary."""
        values = self._value(key, None)
        listed = values if isinstance(values, list) else [values]
        if not listed or any(type(each) is not int or each < 1 for each in listed):
            self.refuse(key, "it must be an integer above 0")
        if len({*listed}) > 1:
            self.refuse(key, remedy)
        return int(listed[0])

    def number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        """A number greater than `above`, its size 0 or in [LEAST, MOST]; `default` where absent.

        It is refused where absent if the default is None.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "it must be a number")
        try:
            number = float(value)
        except OverflowError:
            self.refuse(key, "it is too large")
        if not math.isfinite(number) or number <= above:
            self.refuse(key, f"it must be finite and above {above:g}")
        if number and not LEAST <= abs(number) <= MOST:
            self.refuse(key, f"its size must lie in [{LEAST:g}, {MOST:g}]")
        return number

    def optional_number(self, key: str) -> float | None:
        """As `number`, but None where absent."""
        return self.number(key) if key in self else None

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """True or false; `default` where absent, refused if that is None."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `default` where absent, refused if that is None."""
        value = self._value(key, default)
        if not isinstance(value, str):
            self.refuse(key, "it must be a string")
        return value

    def items(self, key: str, of: type[_Item], remedy: str) -> list[_Item]:
        """A list, each of whose items has exactly this type; refused with `remedy` otherwise."""
        values = self._value(key, None)
        if not isinstance(values, list) or any(type(each) is not of for each in values):
            self.refuse(key, remedy)
        return values

    def only(
        self, known: frozenset[str], remedy: str, needed: frozenset[str] = frozenset()
    ) -> None:
        """Refuse keys that are not `known`, and say in the same line which `needed` ones lack."""
        strange = [key for key in sorted(self._values) if key not in known]
        lacking = [self._name(key) for key in sorted(needed) if key not in self]
        found = []
        if strange:
            each = [f"{self._name(key)!r} (value {_shown(self._values[key])})" for key in strange]
            hidden = len(each) - _MOST_UNKNOWN
            plural, more = "s" if len(each) > 1 else "", f" and {hidden} more" if hidden > 0 else ""
            found.append(f"unknown key{plural} {', '.join(each[:_MOST_UNKNOWN])}{more}: {remedy}")
        if lacking:
            verb = "is" if len(lacking) == 1 else "are"
            complete = self._complete if verb == "is" else self._complete.replace(" it", " them")
            found.append(f"{', '.join(lacking)} {verb} missing: {complete}")
        if found:
            raise CheckpointError(f"{self._file}: {'; '.join(found)}")

    def refuse(self, key: str, remedy: str) -> NoReturn:
        """Raise CheckpointError naming file, key and value."""
        value = _shown(self.raw(key))
        raise CheckpointError(f"{self._file}: {self._name(key)} is {value}: {remedy}")

    def _name(self, key: str) -> str:
        return self._names.get(key, f"{self._within}{key}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self._file}: {self._name(key)} is missing: {self._complete}")
        return default


def _shown(value: object) -> str:
    if isinstance(value, list) and len(value) > _MOST_SHOWN:
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
