"""Templates whose work is counted while they run, so that a short one may run where others wait.

A checkpoint's template is code. Here each loop, call, filter and text costs units in proportion to
the time and memory that it may take, and what has no such bound (powers, `center`, ...) is not
done: BeyondCount is raised, and the conversation is rendered in a process whose time and memory are
bounded. The text is the same either way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from tpdet.template_language import (
    PRINTED,
    ROWS,
    TemplateLanguage,
    filtered,
    join_texts,
    namespace_values,
    printable,
    raise_exception,
    to_json,
)

METER = "the meter"  # with a blank: no template can spell it
_SIZED_TYPES: tuple[Any, ...] = (str, dict, range, *ROWS)
_SIZED = "to be sized"
_LETTERS = 4  # 2 ** 4 letters of a text are one unit
_SCALARS = frozenset((int, bool, float, type(None)))
_MOST_BITS = 64
_LONGEST_JOINT = 1000
_DEEPEST_INDENT = 16
_FREE_UNITS = 20_000

_NODES = frozenset(
    "Template Output TemplateData If Assign AssignBlock NSRef Name Const Getattr Getitem Slice "
    "Call Keyword Filter Test Compare Operand And Or Not Neg Pos CondExpr Concat Add Sub Mul Div "
    "FloorDiv Mod List Tuple Dict Pair Break Continue For Macro With".split()
)
_FILTERS = frozenset(
    "abs capitalize count d default e escape first float int items last length list lower map "
    "reject rejectattr replace reverse round safe select selectattr string title trim upper".split()
)
_TESTS = frozenset(
    "boolean callable defined even false float integer iterable lower mapping none number odd "
    "sequence string true undefined upper".split()
)
_COMPARING_TESTS = frozenset("!= < <= == > >= eq equalto ge gt in le lt ne sameas".split())
_METHODS: dict[Any, frozenset[str]] = {
    str: frozenset(
        "capitalize count endswith find index isalnum isalpha isdigit islower isnumeric isspace "
        "istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex rpartition "
        "rsplit rstrip split splitlines startswith strip swapcase title upper".split()
    ),
    dict: frozenset("get items keys values".split()),
    list: frozenset("count index".split()),
    tuple: frozenset("count index".split()),
}


class BeyondCount(Exception):
    """A template does what is not counted, or more than may be done here."""


class Meter:
    """Units that are left of one rendering."""

    __slots__ = ("left",)

    def __init__(self, units: int) -> None:
        self.left = units

    def spend(self, units: int) -> None:
        """Raise BeyondCount when there are no units left."""
        self.left -= units
        if self.left < 0:
            raise BeyondCount

    def size(self, value: Any) -> None:
        """Spend what looking at all of a value costs; shared parts count each time."""
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


class CountedTemplate:
    """A template with its count; `make` is None for one that could never run here."""

    def __init__(self, template: jinja2.Template, weight: int) -> None:
        self._template, self._weight = template, weight

    @classmethod
    def make(cls, source: str) -> "CountedTemplate | None":
        """The template if all of its statements can be counted. Raises as TemplateLanguage.make."""
        language = _CountedLanguage()
        tree = language.parse(source)
        if any(type(node).__name__ not in _NODES for node in tree.find_all(nodes.Node)):
            return None
        if any(node.recursive for node in tree.find_all(nodes.For)):
            return None
        counts = _Counts(language)
        weight = _weight(tree)
        return cls(language.from_string(counts.visit(language.checked_tree(tree))), weight)

    def render(self, messages: Sequence[Any], **variables: Any) -> str:
        """The text. Raises BeyondCount, and whatever the template raises.

        An ordinary template does all of its statements for each message, and looks at each text
        some times: ten times that is free.
        """
        sizer = Meter(1 << 40)
        sizer.size(list(messages))
        seen = (1 << 40) - sizer.left
        meter = Meter(_FREE_UNITS + 10 * ((1 + len(messages)) * self._weight + seen))
        meter.spend(self._weight)
        return self._template.render(messages=messages, **variables, **{METER: meter})


class _CountedLanguage(TemplateLanguage):
    """Every filter, test, call and operator spends units, or is not there."""

    def __init__(self) -> None:
        super().__init__()
        for name, function in [*self.filters.items()]:
            self.filters[name] = _counting(function) if name in _FILTERS else _beyond
        for name, function in [*self.tests.items()]:
            if name not in _TESTS:
                counted = name in _COMPARING_TESTS
                compare: Any = function
                self.tests[name] = _counting(compare) if counted else _beyond
        self.filters["tojson"], self.filters["join"] = _to_json, _join
        self.filters["replace"] = _counted_replace(self.filters["replace"])
        self.filters[_SIZED], self.filters[PRINTED] = _sized, _printed

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Numbers of a machine word, and `+` of texts and lists."""
        if isinstance(left, int | float) and isinstance(right, int | float):
            if operator == "**" or any(
                isinstance(n, int) and n.bit_length() > _MOST_BITS for n in (left, right)
            ):
                raise BeyondCount
        elif operator == "+":
            meter = _meter(context)
            meter.size(left)
            meter.size(right)
        elif not isinstance(left, Undefined) and not isinstance(right, Undefined):
            raise BeyondCount
        return super().call_binop(context, operator, left, right)

    def call(
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Macros, namespaces, `range`, and methods whose work their arguments bound."""
        meter = _meter(__context)
        if args or kwargs:
            meter.size((args, kwargs))
        owner = getattr(__obj, "__self__", None)
        if type(owner) in _METHODS and __obj.__name__ in _METHODS[type(owner)]:
            if isinstance(owner, str):
                meter.size(owner)
        elif isinstance(owner, str) and __obj.__name__ == "replace" and len(args) >= 2:
            meter.spend(_replacing_costs(owner, args[0], args[1]))
        elif isinstance(owner, str) and __obj.__name__ == "join" and len(args) == 1:
            meter.spend(_joining_costs(owner, args[0]))
        elif not isinstance(__obj, Macro | Undefined) and all(__obj is not c for c in _CALLABLE):
            raise BeyondCount
        found = super().call(__context, __obj, *args, **kwargs)
        if not isinstance(found, str | range):  # texts are paid for where they come from
            meter.size(found)
        return found


_CALLABLE: tuple[Any, ...] = (Namespace, dict, safe_range, raise_exception)


class _Counts(NodeTransformer):
    """Puts counts around loops, into macros, and around what is made or looked through whole."""

    def __init__(self, language: _CountedLanguage) -> None:
        self._language = language

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = _weight(node)
        self.generic_visit(node)
        node.iter = filtered(node.iter, self._filter("counted", weight, _looping(weight)))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        weight = _weight(node)
        self.generic_visit(node)
        nothing = nodes.Const("", lineno=node.lineno, environment=node.environment)
        spent = filtered(nothing, self._filter("spent", weight, _spending(weight)))
        node.body.insert(0, nodes.Output([spent], lineno=node.lineno))
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return filtered(node, _SIZED)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return filtered(node, _SIZED)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return filtered(node, _SIZED) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = filtered(node.node, _SIZED)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        places: list[Any] = [node, *node.ops]
        # What is compared with a text of the template costs no more than that has letters.
        cheap = all(op.op not in ("in", "notin") for op in node.ops)
        if cheap and any(isinstance(place.expr, nodes.Const) for place in places):
            return node
        for place in places:
            if not isinstance(place.expr, nodes.Const):
                place.expr = filtered(place.expr, _SIZED)
        return node

    def _filter(self, kind: str, weight: int, function: Callable[..., Any]) -> str:
        """The name of a filter that is there for one weight alone: templates can give it none."""
        name = f"{kind} {weight} a time"
        self._language.filters[name] = function
        return name


def _weight(node: nodes.Node) -> int:
    return 1 + sum(1 for _ in node.find_all(nodes.Node))


def _meter(context: Context) -> Meter:
    found: Meter = context.parent[METER]
    return found


def _looping(weight: int) -> Callable[..., Any]:
    @pass_context
    def counted(context: Context, value: Any) -> Any:
        """What is looped over, paid for: at once if it has a length, else one by one."""
        meter = _meter(context)
        if isinstance(value, _SIZED_TYPES):
            meter.spend((1 + len(value)) * weight)
            return value
        return value if isinstance(value, Undefined) else _one_by_one(meter, weight, value)

    return counted


def _one_by_one(meter: Meter, weight: int, values: Any) -> Any:
    for value in values:
        meter.spend(weight)
        yield value


def _spending(weight: int) -> Callable[..., Any]:
    @pass_context
    def spent(context: Context, value: Any) -> Any:
        _meter(context).spend(weight)
        return value

    return spent


@pass_context
def _printed(context: Context, value: Any) -> Any:
    _meter(context).size(value)
    return printable(value)


@pass_context
def _sized(context: Context, value: Any) -> Any:
    _meter(context).size(value)
    return value


@pass_context
def _beyond(*_: Any, **__: Any) -> Any:
    raise BeyondCount


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its input, its arguments and its result."""
    wants = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.size(value)
        if args or kwargs:
            meter.size((args, kwargs))
        first: tuple[Any, ...] = ()
        if wants is not None:
            own = {"context": context, "eval_context": context.eval_ctx}
            first = (own.get(wants.name, context.environment),)
        found = function(*first, value, *args, **kwargs)
        if not isinstance(found, str):  # a text is at most some times as long as what it is made of
            meter.size(found)
        return found

    return counted


@pass_context
def _to_json(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    meter = _meter(context)
    meter.size(value)
    meter.size((args, kwargs))
    indent = args[1] if len(args) > 1 else kwargs.get("indent")
    if isinstance(indent, str) or (isinstance(indent, int) and indent > _DEEPEST_INDENT):
        raise BeyondCount
    if len(str(args[2] if len(args) > 2 else kwargs.get("separators"))) > _LONGEST_JOINT:
        raise BeyondCount
    found = to_json(value, *args, **kwargs)
    meter.size(found)
    return found


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> Any:
    meter = _meter(context)
    items = list(_one_by_one(meter, 1, value))
    meter.size(items)
    meter.spend(_joining_costs(str(printable(d)), items))
    return join_texts(context, items, d, attribute)


def _counted_replace(replace: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def counted(context: Context, value: Any, old: Any, new: Any, *args: Any, **kwargs: Any) -> Any:
        _meter(context).spend(_replacing_costs(value, old, new))
        return replace(context, value, old, new, *args, **kwargs)

    return counted


def _replacing_costs(text: Any, old: Any, new: Any) -> int:
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        raise BeyondCount
    most = len(text) + (1 + len(text) // max(1, len(old))) * len(new)
    return 1 + (most >> _LETTERS)


def _joining_costs(joint: str, items: Any) -> int:
    if not isinstance(items, list | tuple):
        raise BeyondCount
    return 1 + (len(joint) * len(items) >> _LETTERS)
