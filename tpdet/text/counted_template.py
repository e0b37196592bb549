"""Chat templates whose work is counted, so that short ones may run in a shared process.

A checkpoint's template is code. Here each loop, call, filter and text costs units in proportion to
the time and memory that it may take. Work without such a bound (powers, `center`, ...) raises
BeyondCount; the conversation is then rendered in a process with limited time and memory. The text
is the same either way.
"""

from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from tpdet.text.template_date import LONGEST_FORMAT, TemplateDate
from tpdet.text.template_language import PRINTED, TemplateLanguage, filtered, raise_exception
from tpdet.text.template_meter import (
    METER,
    BeyondCount,
    Meter,
    beyond,
    joining_costs,
    meter_of,
    paid_filter,
    paid_join,
    paid_loop,
    paid_print,
    paid_replace,
    paid_size,
    paid_to_json,
    replacing_costs,
)

_SIZED = "to be sized"
_MOST_BITS = 64
_FREE_UNITS = 20_000
_NO_LIMIT = 2**40  # units that no conversation costs

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


class CountedTemplate:
    """A template whose work is counted."""

    def __init__(self, template: jinja2.Template, weight: int) -> None:
        self._template, self._weight = template, weight

    @classmethod
    def make(cls, source: str) -> "CountedTemplate | None":
        """The template; None if a statement cannot be counted. Raises as TemplateLanguage.make."""
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

        An ordinary template runs all of its statements for each message, and reads each text a few
        times; ten times that amount is allowed.
        """
        sizer = Meter(_NO_LIMIT)
        sizer.size([*messages, variables])
        seen = _NO_LIMIT - sizer.left
        meter = Meter(_FREE_UNITS + 10 * ((1 + len(messages)) * self._weight + seen))
        meter.spend(self._weight)
        return self._template.render(messages=messages, **variables, **{METER: meter})


class _CountedLanguage(TemplateLanguage):
    """Every filter, test, call and operator costs units, or raises BeyondCount."""

    def __init__(self) -> None:
        super().__init__()
        for name, function in [*self.filters.items()]:
            self.filters[name] = paid_filter(function) if name in _FILTERS else beyond
        for name, function in [*self.tests.items()]:
            if name not in _TESTS:
                counted = name in _COMPARING_TESTS
                compare: Any = function
                self.tests[name] = paid_filter(compare) if counted else beyond
        self.filters["tojson"], self.filters["join"] = paid_to_json, paid_join
        self.filters["replace"] = paid_replace(self.filters["replace"])
        self.filters[_SIZED], self.filters[PRINTED] = paid_size, paid_print

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators on numbers of at most 64 bits, and `+` on texts and lists."""
        if isinstance(left, int | float) and isinstance(right, int | float):
            if operator == "**" or any(
                isinstance(n, int) and n.bit_length() > _MOST_BITS for n in (left, right)
            ):
                raise BeyondCount
        elif operator == "+":
            meter = meter_of(context)
            meter.size(left)
            meter.size(right)
        elif not isinstance(left, Undefined) and not isinstance(right, Undefined):
            raise BeyondCount
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Macros, namespaces, `range`, and methods whose work their arguments bound."""
        meter = meter_of(__context)
        if args or kwargs:
            meter.size((args, kwargs))
        owner = getattr(__obj, "__self__", None)
        if type(owner) in _METHODS and __obj.__name__ in _METHODS[type(owner)]:
            if isinstance(owner, str):
                meter.size(owner)
        elif isinstance(owner, str) and __obj.__name__ == "replace" and len(args) >= 2:
            meter.spend(replacing_costs(owner, args[0], args[1]))
        elif isinstance(owner, str) and __obj.__name__ == "join" and len(args) == 1:
            meter.spend(joining_costs(owner, args[0]))
        elif isinstance(__obj, TemplateDate):
            meter.spend(LONGEST_FORMAT)
        elif not isinstance(__obj, Macro | Undefined) and all(__obj is not c for c in _CALLABLE):
            raise BeyondCount
        result = super().call(__context, __obj, *args, **kwargs)
        if not isinstance(result, str | range):  # texts are paid for where they come from
            meter.size(result)
        return result


_CALLABLE: tuple[Any, ...] = (Namespace, dict, safe_range, raise_exception)


class _Counts(NodeTransformer):
    """Puts counts around loops, into macros, and around what is made or looked through whole."""

    def __init__(self, language: _CountedLanguage) -> None:
        self._language = language

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = _weight(node)
        self.generic_visit(node)
        node.iter = self._paid(node.iter, weight)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        weight = _weight(node)
        self.generic_visit(node)
        nothing = nodes.Const("", lineno=node.lineno, environment=node.environment)
        node.body.insert(0, nodes.Output([self._paid(nothing, weight)], lineno=node.lineno))
        return node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return filtered(node, _SIZED)

    visit_Dict = visit_List

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
        operands: list[Any] = [node, *node.ops]
        # What is compared with a text of the template costs no more than that has letters.
        cheap = all(op.op not in ("in", "notin") for op in node.ops)
        if cheap and any(isinstance(operand.expr, nodes.Const) for operand in operands):
            return node
        for operand in operands:
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = filtered(operand.expr, _SIZED)
        return node

    def _paid(self, values: nodes.Node, weight: int) -> nodes.Filter:
        """Values through a filter of this weight alone: no template can write its name."""
        name = f"counted {weight} a time"
        self._language.filters[name] = paid_loop(weight)
        return filtered(values, name)


def _weight(node: nodes.Node) -> int:
    return 1 + sum(1 for _ in node.find_all(nodes.Node))
