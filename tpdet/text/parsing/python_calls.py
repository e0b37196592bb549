"""Calls of tools as Python writes them: `[weather(city="Paris"), time()]`, or one a line."""

import ast
import re
import warnings

from tpdet.text.parsing.json_text import written

_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}
_OUTSIDE = re.compile(r"""["'()\[\]{}]""")
_PARTS = re.compile(r"""["'()\[\]{},\n]""")
_CALL_BEGINS = re.compile(r"\s*[A-Za-z_][\w.]*\s*\(")
_CALL_MAY_BEGIN = re.compile(r"\s*([A-Za-z_][\w.]*\s*)?")
_WORDS = {"true": True, "false": False, "null": None}


class PythonScanner:
    """Finds the end of a list in brackets in text that comes in pieces, in linear time.

    `done`: its end was seen. `in_string`: the text so far ends inside of a string.
    """

    __slots__ = ("_depth", "_escaped", "_goes_on", "_quote", "done")

    def __init__(self, goes_on: bool = False) -> None:
        """goes_on: others may follow behind the end, which are read too."""
        self._depth, self._quote, self._goes_on = 0, "", goes_on
        self._escaped = self.done = False

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends inside of a string."""
        return self._quote != ""

    def feed(self, text: str) -> int:
        """How many characters of the next piece belong to the list."""
        position, size = 0, len(text)
        while position < size:
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            pattern = _IN_STRING[self._quote] if self._quote else _OUTSIDE
            match = pattern.search(text, position)
            if match is None:
                return size
            character, position = match[0], match.end()
            if character == "\\":
                self._escaped = True
            elif character in "'\"":
                self._quote = "" if self._quote else character
            elif character in "([{":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self._depth = 0
                    self.done = True
                    if not self._goes_on:
                        return position
        return size


def may_begin(text: str) -> bool:
    """Whether a text may be the beginning of a call: a name, and a bracket behind it."""
    if _CALL_BEGINS.match(text):
        return True
    match = _CALL_MAY_BEGIN.match(text)
    return match is not None and match.end() == len(text)


def begun(text: str) -> tuple[str, str]:
    """A cut text's whole calls, and its last one without what was cut; each may be empty."""
    outside = 1 if text.lstrip().startswith("[") else 0
    depth, position, start, closed, whole = 0, 0, 0, 0, 0
    quote = ""
    while match := (_IN_STRING[quote] if quote else _PARTS).search(text, position):
        character, position = match[0], match.end()
        if character == "\\":
            position += 1
        elif character in "'\"":
            quote = "" if quote else character
        elif character in "([{":
            depth += 1
            whole = position if depth == outside + 1 else whole
        elif character in ")]}":
            depth -= 1
            closed = position if depth == outside else closed
        elif depth == outside + 1 and character == ",":
            whole = match.start()
        if depth == outside and character in "[,\n":
            start = position
    calls = text[:closed] + "]" * outside if closed else ""
    return calls, (f"{text[start:whole]})" if depth > outside else "")


def read(text: str) -> list[tuple[str, str]]:
    """The names and the arguments' JSON of calls.

    Raises ValueError for what is no list of calls with named arguments that are literals.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that Python does not know
            tree = ast.parse(text.strip())
        nodes: list[ast.expr] = []
        for statement in tree.body:
            if not isinstance(statement, ast.Expr):
                raise ValueError("this is no call")
            value = statement.value
            nodes.extend(value.elts if isinstance(value, ast.List) else [value])
        return [_call(node) for node in nodes]
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("this is no list of calls") from error


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("this is no call with named arguments")
    names = [keyword.arg for keyword in node.keywords]
    if None in names or len({*names}) != len(names):
        raise ValueError("an argument needs a name of its own")
    arguments = {str(k.arg): _value(k.value) for k in node.keywords}
    return _name(node.func), written(arguments)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("a call needs a name")
    return node.id


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            members = {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
            if len(members) != len(keys):
                raise ValueError("an object names a member twice")
            return members
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            if not isinstance(value, bool):
                return -value
    raise ValueError("an argument is no literal")


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("an object's keys are strings")
    return node.value
