"""Counts a template's work in units, in proportion to the time and memory that it may take."""

from collections.abc import Callable
from typing import Any

from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace, pass_context

from tpdet.text.template_language import ROWS, join_texts, namespace_values, printable, to_json

METER = "the meter"  # a variable's name with a blank, which no template can write
_SIZED_TYPES: tuple[Any, ...] = (str, dict, range, *ROWS)
_LETTERS = 4  # 2**4 letters of a text cost one unit
_SCALARS = frozenset((int, bool, float, type(None)))
_LONGEST_JOINT = 1000
_DEEPEST_INDENT = 16


class BeyondCount(Exception):
    """A template did work that is not counted, or more work than is allowed here."""


class Meter:
    """The units that remain for one rendering."""

    __slots__ = ("left",)

    def __init__(self, units: int) -> None:
        self.left = units

    def spend(self, units: int) -> None:
        """Raise BeyondCount when there are no units left."""
        self.left -= units
        if self.left < 0:
            raise BeyondCount

    def size(self, value: Any) -> None:
        """Spend the cost of reading a whole value; shared parts count each time."""
        if type(value) is str:
            self.left -= 1 + (len(value) >> _LETTERS)
        elif type(value) in _SCALARS:
            self.left -= 1
        else:
            self._size_all(value)
        if self.left < 0:
            raise BeyondCount

    def _size_all(self, value: Any) -> None:
        waiting = [value]
        while waiting:
            item = waiting.pop()
            self.spend(1)
            if isinstance(item, str):
                self.spend(len(item) >> _LETTERS)
            elif isinstance(item, dict):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, ROWS):
                waiting += item
            elif isinstance(item, range):
                self.spend(len(item) // 4)
            elif isinstance(item, Namespace):
                waiting.append(namespace_values(item))


def meter_of(context: Context) -> Meter:
    """The meter of the current rendering."""
    meter: Meter = context.parent[METER]
    return meter


def paid_loop(weight: int) -> Callable[..., Any]:
    """A filter for the values of a loop; each pass costs `weight` units, as does looking at it."""

    @pass_context
    def counted(context: Context, value: Any) -> Any:
        """The values, paid for at once if they have a length, otherwise one by one."""
        meter = meter_of(context)
        if isinstance(value, _SIZED_TYPES):
            meter.spend((1 + len(value)) * weight)
            return value
        return value if isinstance(value, Undefined) else _one_by_one(meter, weight, value)

    return counted


def _one_by_one(meter: Meter, weight: int, values: Any) -> Any:
    for value in values:
        meter.spend(weight)
        yield value


@pass_context
def paid_print(context: Context, value: Any) -> Any:
    """A filter for values that become text."""
    meter_of(context).size(value)
    return printable(value)


@pass_context
def paid_size(context: Context, value: Any) -> Any:
    """A filter for values that are made, or read, as a whole."""
    meter_of(context).size(value)
    return value


@pass_context
def beyond(*_: Any, **__: Any) -> Any:
    """Stands for a filter or test whose work is not counted."""
    raise BeyondCount


def paid_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its input, its arguments and its result."""
    wants = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        meter.size(value)
        if args or kwargs:
            meter.size((args, kwargs))
        first: tuple[Any, ...] = ()
        if wants is not None:
            own = {"context": context, "eval_context": context.eval_ctx}
            first = (own.get(wants.name, context.environment),)
        result = function(*first, value, *args, **kwargs)
        # A text is at most a few times longer than the values it is made of.
        if not isinstance(result, str):
            meter.size(result)
        return result

    return counted


@pass_context
def paid_to_json(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    """The filter `tojson`."""
    meter = meter_of(context)
    meter.size(value)
    meter.size((args, kwargs))
    indent = args[1] if len(args) > 1 else kwargs.get("indent")
    if isinstance(indent, str) or (isinstance(indent, int) and indent > _DEEPEST_INDENT):
        raise BeyondCount
    if len(str(args[2] if len(args) > 2 else kwargs.get("separators"))) > _LONGEST_JOINT:
        raise BeyondCount
    text = to_json(value, *args, **kwargs)
    meter.size(text)
    return text


@pass_context
def paid_join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> Any:
    """The filter `join`."""
    meter = meter_of(context)
    items = list(_one_by_one(meter, 1, value))
    meter.size(items)
    meter.spend(joining_costs(str(printable(d)), items))
    return join_texts(context, items, d, attribute)


def paid_replace(replace: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `replace`."""

    @pass_context
    def counted(context: Context, value: Any, old: Any, new: Any, *args: Any, **kwargs: Any) -> Any:
        meter_of(context).spend(replacing_costs(value, old, new))
        return replace(context, value, old, new, *args, **kwargs)

    return counted


def replacing_costs(text: Any, old: Any, new: Any) -> int:
    """Units of `text.replace(old, new)`, which may be much longer than `text`."""
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        raise BeyondCount
    most = len(text) + (1 + len(text) // max(1, len(old))) * len(new)
    return 1 + (most >> _LETTERS)


def joining_costs(joint: str, items: Any) -> int:
    """Units of the joints of `joint.join(items)`."""
    if not isinstance(items, list | tuple):
        raise BeyondCount
    return 1 + (len(joint) * len(items) >> _LETTERS)
