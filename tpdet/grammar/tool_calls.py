"""Tool calls as a grammar of the llguidance library, in the form of a model's family.

The arguments of each tool follow its schema. Marks that are tokens are those tokens, and never
their letters; text between calls holds no mark.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from keyword import iskeyword
from typing import Any, NamedTuple

from tpdet.errors import RequestError
from tpdet.grammar.explain import ONE_OF
from tpdet.grammar.layouts import LAYOUTS, Layout
from tpdet.grammar.places import every, resolved
from tpdet.grammar.rewrite import rewritten
from tpdet.grammar.schema_options import with_options
from tpdet.requests.tools import ToolUse

FIELD = "tools"
FREE_TOKENS = '%llguidance {"no_forcing": true}'
"""The first line of a grammar: any division of its texts into tokens is allowed."""

_ANY = {"type": "object"}
_SEPARATORS = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
_ESCAPED_OR_MARK = re.compile(r"\\.|[/\n]", re.DOTALL)
_KEY = re.compile(r"[^<>\n]+")
# What a schema's keywords of texts have to be, where texts stand as they are.
_OF_TEXTS = {"enum": list, "pattern": str, "minLength": int, "maxLength": int}
_DEEPEST = 8
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment", "format"}
_FOLLOWED = {"type", "enum", "const", "minLength", "maxLength", *_NOTES}
# Keywords of a schema's top that arguments between tags cannot follow.
_TOP = ("anyOf", "oneOf", "allOf", "not", "if", "minProperties", "maxProperties", "enum", "const",
        "patternProperties", "dependentRequired", "dependentSchemas", "$ref")  # fmt: skip


class CallForm(NamedTuple):
    """Which calls an answer may hold: the text of an `AnswerForm`, read.

    layout: a name in LAYOUTS. schemas: by the name of each tool that may be called; None for any
    arguments. content: the schema of an answer without calls; None for any text.
    """

    layout: str
    required: bool
    parallel: bool
    schemas: dict[str, dict[str, Any] | None]
    content: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The form as compact JSON; equal forms have equal texts."""
        tools = [
            {"name": name} | ({} if schema is None else {"parameters": schema})
            for name, schema in self.schemas.items()
        ]
        fields = {"layout": self.layout, "required": self.required, "parallel": self.parallel}
        fields |= {"tools": tools} | ({} if self.content is None else {"content": self.content})
        return json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> "CallForm":
        """The form that a text is of. Raises RequestError for another text."""
        try:
            value = json.loads(text)
            schemas = {tool["name"]: tool.get("parameters") for tool in value["tools"]}
            how = value["layout"], value["required"], value["parallel"]
            form = cls(*how, schemas, value.get("content"))
            if form.layout not in LAYOUTS or form.text != text or not schemas:
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise RequestError(
                "tool_calls is not what a chat with tools makes: give tools to the chat", FIELD
            ) from None
        return form

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that are tokens, where the tokenizer has them."""
        return LAYOUTS[self.layout].marks


def form_of_calls(use: ToolUse, layout: str, content: dict[str, Any] | None = None) -> str | None:
    """The text of the form that an answer follows; None where it may be any text.

    layout: the family's. content: the schema of an answer without calls, if it has one. Raises
    RequestError for names that the family cannot print.
    """
    for tool in use.tools:
        if not LAYOUTS[layout].prints(tool.name):
            raise RequestError(
                f"the tool name {tool.name!r:.80} cannot be printed in calls of {layout}: use "
                "letters, digits, underscores and points",
                FIELD,
            )
    if not use.constrains and content is None:
        return None
    required = use.mode == "required"
    schemas = {
        tool.name: tool.parameters if required or tool.strict else None for tool in use.callable
    }
    return CallForm(layout, required, use.parallel, schemas, None if required else content).text


class CallGrammar(NamedTuple):
    """A grammar in llguidance's Lark, and its schemas, each with the name of its tool.

    That of answers without calls has no name. The library tries a schema when an output comes to
    it: each has to be tried alone before.
    """

    text: str
    schemas: list[tuple[str | None, str]]


def grammar_of(form: CallForm, ids: Mapping[str, int]) -> CallGrammar:
    """The grammar of calls; ids: of the marks that are tokens.

    Raises RequestError for a schema that its family's form of arguments cannot follow.
    """
    return _GrammarWriter(form, LAYOUTS[form.layout], ids).written()


class _GrammarWriter:
    """Writes one grammar, rule by rule."""

    def __init__(self, form: CallForm, layout: Layout, ids: Mapping[str, int]) -> None:
        self._form, self._layout, self._ids = form, layout, ids
        known = sorted((mark for mark in layout.marks if mark in ids), key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._rules: list[str] = []
        self._schemas: list[tuple[str | None, str]] = []

    def written(self) -> CallGrammar:
        """The whole grammar."""
        layout, parallel = self._layout, self._form.parallel
        names = [f"call_{i}" for i in range(len(self._form.schemas))]
        for name, (tool, schema) in zip(names, self._form.schemas.items(), strict=True):
            self._call(name, tool, schema)
        self._rules.append(f"call: {self._literal(layout.call_begin)} ({' | '.join(names)})")
        more = f"({self._literal(layout.between)} call)*" if parallel else ""
        calls = f"{self._literal(layout.begin)} call {more} {self._literal(layout.end)}"
        self._rules += [f"calls: {calls}", "TEXT: /(?s:.+)/", "BLANK: /[ \\n\\t]{1,8}/"]
        start = f"start: {self._start()}"
        return CallGrammar("\n".join([FREE_TOKENS, start, *self._rules]), self._schemas)

    def _start(self) -> str:
        form, layout = self._form, self._layout
        if layout.messages:
            return self._messages()
        if form.required:
            return "BLANK? calls"
        if form.content is not None:
            return f"BLANK? calls BLANK? | {self._content(form.content)}"
        first = layout.begin or layout.call_begin
        if self._mark.match(first):
            one = "calls" if layout.begin or not form.parallel else "call"
            return f"TEXT? ({one} TEXT?)*" if form.parallel else "TEXT? (calls BLANK?)?"
        if layout.bare:
            self._rules.append(f"FREE: /[ \\n\\t]*([^ \\n\\t{_escaped(layout.bare)}](?s:.*))?/")
            return "BLANK? calls BLANK? | FREE"
        mark = next((m for m in layout.marks if first.startswith(m)), first)
        self._rules += [
            f"FREE: /(?s:.*)/ & ~/(?s:.*){_escaped(mark)}(?s:.*)/",
            f"before[suffix={_text(mark)}]: /(?s:.*)/",
        ]
        rest = self._literal(first[len(mark) :])
        self._rules.append(f"marked: before {rest} {self._behind_first()}")
        return "marked* FREE" if form.parallel else "marked BLANK? | FREE"

    def _behind_first(self) -> str:
        """A list of calls, or one, behind the text that it begins with."""
        layout = self._layout
        names = " | ".join(f"call_{i}" for i in range(len(self._form.schemas)))
        if not layout.begin:
            return f"({names})"
        more = f"({self._literal(layout.between)} call)*" if self._form.parallel else ""
        return f"call {more} {self._literal(layout.end)}"

    def _messages(self) -> str:
        """Harmony's: thoughts, and messages to the user between, come before a call."""
        head, text = self._literal("<|channel|>"), f"{self._literal('<|message|>')} TEXT?"
        go_on = self._literal("<|end|><|start|>assistant")
        content = self._form.content
        if content is not None:
            json_text = self._literal(" <|constrain|>json<|message|>")
            text_or_json = f"({self._literal('<|message|>')} | {json_text})"
            final = f'final: {head} "final" {text_or_json} {self._content(content)}'
        else:
            final = f'final: {head} "final" {text}'
        self._rules += [
            f'thought: {head} "analysis" {text} {go_on}',
            f'said: {head} "commentary" {text} {go_on}',
            final,
        ]
        return "thought* call" if self._form.required else "(thought | said)* (call | final)"

    def _call(self, rule: str, tool: str, schema: dict[str, Any] | None) -> None:
        """The rule of a call behind `call_begin`."""
        layout = self._layout
        name = json.dumps(tool, ensure_ascii=False) if layout.quoted else tool
        if layout.python:
            arguments = self._keywords(rule, tool, schema)
        elif layout.argument[0]:
            arguments = self._tagged(rule, tool, schema)
        else:
            arguments = self._json(tool, _object(tool, schema))
        begin = self._literal(name + layout.name_end)
        if layout.call_id:
            written = self._literal(name + layout.call_id)
            begin = f"{written} /[A-Za-z0-9]{{9}}/ {self._literal(layout.name_end)}"
        self._rules.append(f"{rule}: {begin} {arguments} {self._literal(layout.call_end)}")

    def _tagged(self, rule: str, tool: str, schema: dict[str, Any] | None) -> str:
        """Rules of a call's arguments, one for each; what stands for all of them."""
        begin, middle, end = self._layout.argument
        if schema is None:
            raw = self._raw({}, f"{rule}_any")
            self._rules += [
                f"{rule}_key: /[^<>\\n]{{1,64}}/",
                f"{rule}_any: {self._literal(begin)} {rule}_key {self._literal(middle)} {raw}",
            ]
            return f"{rule}_any*"
        schema = _plain(tool, schema)
        rules, (properties, required) = [], _arguments(tool, schema)
        for index, (key, inner) in enumerate(properties.items()):
            if not _KEY.fullmatch(key):
                raise _refused(tool, f"{key!r:.60} cannot be printed as a key: rename it")
            one = f"{rule}_{index}"
            values = [
                self._raw(self._tried(tool, value), f"{one}_{i}")
                if _is_text(value)
                else f"{self._json(tool, _rooted(value, schema))} {self._literal(end)}"
                for i, value in enumerate(_cases(tool, schema, inner))
            ]
            self._rules.append(
                f"{one}: {self._literal(begin + key + middle)} ({' | '.join(values)})"
            )
            rules.append(one if key in required else f"{one}?")
        return " ".join(rules)

    def _keywords(self, rule: str, tool: str, schema: dict[str, Any] | None) -> str:
        """A call's arguments as Python's keywords: JSON is Python, but for three words."""
        if schema is None:
            name = "/[a-z][a-z0-9_]{0,63}/"
            self._rules.append(f'{rule}_any: {name} "=" {self._json(tool, {})}')
            return f'({rule}_any (", " {rule}_any)*)?'
        schema = _plain(tool, schema)
        properties, required = _arguments(tool, schema)
        for index, (key, inner) in enumerate(properties.items()):
            if not key.isidentifier() or iskeyword(key):
                raise _refused(tool, f"{key!r:.60} is no name of Python's: rename it")
            value = self._json(tool, _rooted(inner, schema))
            self._rules.append(f'{rule}_{index}: "{key}=" {value}')
        ways, keys = [], [*properties]
        for first, key in enumerate(keys):  # each that may be the first one
            rest = [
                f'", " {rule}_{i}' if other in required else f'(", " {rule}_{i})?'
                for i, other in enumerate(keys)
                if i > first
            ]
            ways.append(" ".join([f"{rule}_{first}", *rest]))
            if key in required:
                return f"({' | '.join(ways)})"
        return f"({' | '.join(ways)})?" if ways else ""

    def _raw(self, schema: dict[str, Any], rule: str) -> str:
        """A value that stands as it is, with the end of its argument."""
        end = self._layout.argument[2]
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if options is not None:
            texts = [_text(option) for option in options if isinstance(option, str)]
            return f"({' | '.join(texts)}) {self._literal(end)}"
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        kinds = [f"/(?s:.{{{low},{high}}})/"] if low or high != "" else ["/(?s:.*)/"]
        if "pattern" in schema:
            kinds.append(lark_regex(_searched(schema["pattern"])))
        if not self._mark.match(end):
            bare = end.strip()
            kinds.append(f"~/(?s:.*){_escaped(bare)}(?s:.*)/")
        name = f"{rule}_text".upper()
        self._rules.append(f"{name}: {' & '.join(kinds)}")
        return f"{name} {self._literal(end)}"

    def _content(self, schema: dict[str, Any]) -> str:
        """An answer without calls."""
        text = with_options(schema, flexible=False)
        self._schemas.append((None, text))
        return f"%json {text}"

    def _json(self, tool: str, schema: dict[str, Any]) -> str:
        try:
            text = with_options(schema, flexible=True)
        except RequestError as error:
            raise _refused(tool, str(error)) from None
        self._schemas.append((tool, text))
        return f"%json {text}"

    def _tried(self, tool: str, schema: dict[str, Any]) -> dict[str, Any]:
        """A text's schema, which the library tries too where it says more than `_raw` follows."""
        if schema.keys() - _FOLLOWED:
            self._json(tool, schema)
        return schema

    def _literal(self, text: str) -> str:
        """A text in which marks are tokens; nothing for an empty one."""
        parts, begin = [], 0
        for match in self._mark.finditer(text):
            parts += [_text(text[begin : match.start()]), f"<[{self._ids[match[0]]}]>"]
            begin = match.end()
        return " ".join(part for part in (*parts, *self._texts(text[begin:])) if part != '""')

    def _texts(self, text: str) -> list[str]:
        """A text; where an answer without calls is JSON too, cut as JSON is: lexemes are greedy."""
        if self._form.content is None or self._layout.bare != "{":
            return [_text(text)]
        return [_text(part) for part in re.findall(r'"(?:[^"\\]|\\.)*"|.', text, re.DOTALL)]


def lark_regex(regex: str) -> str:
    """The regular expression between slashes, its own slashes escaped."""

    def escaped(match: re.Match[str]) -> str:
        return {"/": r"\/", "\n": r"\n"}.get(match[0][-1], match[0])

    return f"/{re.sub(_ESCAPED_OR_MARK, escaped, regex)}/"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _SEPARATORS.sub(r"\\\g<0>", text).replace("\n", r"\n")


def _searched(pattern: str) -> str:
    """A pattern that is looked for anywhere in a text, as one of the whole text."""
    inner = pattern.removeprefix("^")
    before = "" if inner != pattern else "(?s:.*)"
    bare = inner.removesuffix("$") if not inner.endswith("\\$") else inner
    behind = "" if bare != inner else "(?s:.*)"
    return f"{before}(?:{bare}){behind}"


def _object(tool: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object."""
    if schema is None:
        return _ANY
    kind = schema.get("type", "object")
    if kind != "object":
        raise _refused(tool, f'type {kind!r:.40} is no object: arguments are "object"')
    return schema if "type" in schema or "$ref" in schema else {"type": "object"} | schema


def _arguments(tool: str, schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The schemas of arguments by their names, and which are required. Raises RequestError."""
    _object(tool, schema)
    for keyword in _TOP:
        if keyword in schema:
            raise _refused(
                tool,
                f"{keyword} at its top is not followed by this model's calls: write the arguments "
                "under properties",
            )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _refused(tool, "properties must be an object and required a list")
    properties = {k: {} if v is True else v for k, v in properties.items() if v is not False}
    for key, inner in properties.items():
        if not isinstance(inner, dict):
            raise _refused(tool, f"properties.{key!s:.60} is {inner!r:.40}: give a schema")
    for key in required:
        if not isinstance(key, str) or key not in properties:
            raise _refused(tool, f"properties lack the required {key!r:.60}: declare it")
    return properties, required


def _cases(
    tool: str, root: dict[str, Any], schema: Any, depth: int = 0
) -> Iterator[dict[str, Any]]:
    """A value's schema as cases, each of text alone or without any."""
    if not isinstance(schema, dict):
        yield {}
        return
    if depth > _DEEPEST:
        raise _refused(tool, f"anyOf is nested more than {_DEEPEST} deep: flatten it")
    for keyword, kind in _OF_TEXTS.items():
        if not isinstance(schema.get(keyword, kind()), kind):
            raise _refused(tool, f"{keyword} is {schema[keyword]!r:.60}: give a {kind.__name__}")
    if "oneOf" in schema:
        raise _refused(tool, f"oneOf is not supported: {ONE_OF}")
    keyword = "$ref" if "$ref" in schema else "anyOf"
    branches = [{"$ref": schema["$ref"]}] if "$ref" in schema else schema.get("anyOf")
    if isinstance(branches, list) and branches:
        rest = {k: v for k, v in schema.items() if k != keyword}
        for branch in branches:
            yield from _cases(tool, root, _both(tool, root, rest, branch), depth + 1)
        return
    kinds = schema.get("type")
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(options, list):
        texts = [option for option in options if isinstance(option, str)]
        others = [option for option in options if not isinstance(option, str)]
        if texts and (kinds is None or "string" in kinds):
            yield {"type": "string", "enum": texts}
        if others:
            yield {k: v for k, v in schema.items() if k != "const"} | {"enum": others}
    elif isinstance(kinds, list):
        for kind in kinds:
            yield {**schema, "type": kind}
    else:
        yield schema


def _both(tool: str, root: dict[str, Any], rest: dict[str, Any], branch: Any) -> dict[str, Any]:
    """What a branch, or what a reference names, says together with what stands beside it."""
    if not isinstance(branch, dict):
        return rest
    followed = resolved(root, branch) if branch.keys() == {"$ref"} else branch
    if followed is None:
        raise _refused(tool, f"$ref {branch['$ref']!r:.80} names nothing in it: declare it")
    for key in (rest.keys() & followed.keys()) - _NOTES:
        if rest[key] != followed[key]:
            raise _refused(tool, f"{key} beside anyOf or $ref has another in it: write it once")
    return {**rest, **followed}


def _is_text(schema: dict[str, Any]) -> bool:
    """Whether a case of `_cases` is one of text: what names no type is any text."""
    typed = {"type", "properties", "items", "allOf", "enum", "const"} & schema.keys()
    return schema.get("type") == "string" or not typed


def _plain(tool: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of a schema in the words that are followed. Raises RequestError."""
    try:
        return rewritten(copy.deepcopy(schema))
    except RequestError as error:
        raise _refused(tool, str(error)) from None


def _rooted(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A schema with what it may refer to: definitions, or all of the root."""
    shared = {k: v for k, v in root.items() if k in ("$defs", "definitions")}
    references = (one.get("$ref") for _, one in every(shared | schema))
    known = ("#/$defs/", "#/definitions/")
    if all(not isinstance(r, str) or r.startswith(known) for r in references):
        return shared | schema
    return _moved(schema) | {"$defs": {"arguments": _moved(root)}}


def _moved(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of a schema whose references are into the definition `arguments`."""
    moved = copy.deepcopy(schema)
    for _, one in every(moved):
        if isinstance(one.get("$ref"), str):
            one["$ref"] = one["$ref"].replace("#", "#/$defs/arguments", 1)
    return moved


def _refused(tool: str, what: str) -> RequestError:
    return RequestError(f"the parameters of tool {tool!r:.80}: {what}", FIELD)
