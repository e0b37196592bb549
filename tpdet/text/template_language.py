"""The Jinja environment of chat templates: an immutable sandbox whose text is always the same.

It has no clock and no randomness. An object's address differs from process to process, so every
value is checked before it becomes text. Nothing is computed while a template is compiled.
"""

import json
import string
from collections.abc import Callable
from functools import update_wrapper
from itertools import islice
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

_PLAIN = (str, int, float, complex, bytes, type(None), Undefined, range)
_NAMED = (Macro, LoopContext, TemplateReference, type)  # their text has a name and no address
ROWS: tuple[Any, ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
"""Types whose text is made of the texts of their items."""
_FINAL = (*_PLAIN, *_NAMED)
_MOST_VALUES = 1_000_000
MOST_BYTES = 1 << 20
"""The most bytes of a template, whatever file it comes from."""
MOST_TOKENS = 20_000
"""The most tokens of its statements and expressions, blanks too: it is compiled in seconds."""
PRINTED = "to be printed"  # a filter's name with blanks, which no template can write

_MAKE_TEXT = frozenset(
    "capitalize center e escape filesizeformat forceescape format indent lower pprint replace safe "
    "string striptags title trim truncate upper urlencode urlize wordcount wordwrap xmlattr".split()
)
"""Filters that make text of their input and arguments; `join` makes text of its items."""


class TemplateLanguage(ImmutableSandboxedEnvironment):
    """The environment of transformers, without clock, randomness and addresses."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationTag],
            optimized=False,  # otherwise constants such as 10 ** 10 ** 10 are computed at load
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = raise_exception
        del self.filters["random"], self.globals["lipsum"]
        for name in _MAKE_TEXT & {*self.filters}:
            self.filters[name] = _checking(self.filters[name])
        self.filters["join"] = join_texts
        self.filters[PRINTED] = _printed

    def check_size(self, source: str) -> None:
        """Raise jinja2.TemplateError for a template that would take seconds to compile."""
        if len(source.encode("utf-8", "replace")) > MOST_BYTES:
            raise jinja2.TemplateError(f"it is over the limit of {MOST_BYTES} bytes")
        tokens = self.lexer.tokeniter(source, None)
        if next(islice(tokens, MOST_TOKENS, None), None) is not None:
            raise jinja2.TemplateError(
                f"its expressions have over {MOST_TOKENS} names, signs and texts, the limit"
            )

    def make(self, source: str) -> jinja2.Template:
        """The template. Raises jinja2.TemplateError, or what Python's compiler raises."""
        return self.from_string(self.checked_tree(self.parse(source)))

    def checked_tree(self, tree: nodes.Template) -> nodes.Template:
        """The tree with a check around every value that becomes text."""
        found: nodes.Template = _PrintChecks().visit(tree)
        return found

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Python's operators; `%` on a text checks its arguments."""
        if operator == "%" and isinstance(left, str):
            printable(right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` without access to attributes, and with checked arguments."""
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        text = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            for _, field, spec, _ in string.Formatter().parse(text):
                if field and (set(".[") & set(field) or "{" in (spec or "")):
                    raise jinja2.TemplateError(f"the format {text[:40]!r} is not supported")
            printable((args, kwargs))
            return inner(*args, **kwargs)

        return update_wrapper(formatted, value)


def printable(value: Any) -> Any:
    """`value` itself. Raises TemplateError if its text differs from process to process."""
    if type(value) is str or isinstance(value, _PLAIN):
        return value
    waiting, seen = [value], 0
    while waiting:
        item = waiting.pop()
        seen += 1
        if seen > _MOST_VALUES:
            raise jinja2.TemplateError(f"it prints more than {_MOST_VALUES} values")
        if isinstance(item, _FINAL):
            continue
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, ROWS):
            waiting += item
        elif isinstance(item, Namespace):
            waiting.append(namespace_values(item))
        else:
            raise jinja2.TemplateError(
                f"it prints an object ({type(item).__name__}), whose text is another in each "
                "process"
            )
    return value


def namespace_values(namespace: Namespace) -> dict[str, Any]:
    """The variables of a namespace."""
    found: dict[str, Any] = namespace._Namespace__attrs
    return found


def filtered(value: nodes.Node, name: str) -> nodes.Filter:
    """The node of `value | name`."""
    return nodes.Filter(
        value, name, [], [], None, None, lineno=value.lineno, environment=value.environment
    )


@pass_context  # also keeps Jinja from computing it while the template is compiled
def _printed(context: Context, value: Any) -> Any:
    return printable(value)


class _PrintChecks(NodeTransformer):
    """Adds the check `printable` to every value that a template prints or joins by `~`."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            child if isinstance(child, nodes.TemplateData) else filtered(child, PRINTED)
            for child in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [filtered(child, PRINTED) for child in node.nodes]
        return node


def _checking(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function`, which makes text of its arguments, with these checked."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        # Jinja's own arguments (context, environment) come first; they are not printed.
        for value in (*args, *kwargs.values()):
            if not isinstance(value, Context | jinja2.Environment | nodes.EvalContext):
                printable(value)
        return function(*args, **kwargs)

    return update_wrapper(checked, function)


@pass_context
def join_texts(
    context: Context, value: Any, d: str = "", attribute: str | int | None = None
) -> Any:
    """Jinja's `join` with checked items."""
    items = list(value)
    environment = context.environment
    if attribute is not None:
        items = list(environment.call_filter("map", items, (), {"attribute": attribute}, context))
    printable(d)
    printable(items)
    return jinja2.filters.sync_do_join(context.eval_ctx, items, d)


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    """The function by which a template refuses a conversation."""
    raise jinja2.TemplateError(message)


def loads_name(tree: nodes.Template, name: str) -> bool:
    """Whether a template reads a variable that it does not set itself."""
    contexts = {node.ctx for node in tree.find_all(nodes.Name) if node.name == name}
    return "load" in contexts and contexts == {"load"}
