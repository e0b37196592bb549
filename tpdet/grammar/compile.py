"""Compiles the form of an answer to a grammar of the llguidance library, within fixed limits.

The library is imported for the first form; who asks for none does not need it.
"""

import json
import math
import re
from typing import Any

from tpdet.errors import RequestError
from tpdet.grammar.byte_texts import import_library
from tpdet.grammar.explain import one_line, with_place
from tpdet.grammar.places import FIELD, shortened
from tpdet.grammar.rewrite import rewritten
from tpdet.requests.answer_form import AnswerForm

# Blanks between JSON tokens are limited: a model could write them until it runs out of tokens.
_WHITESPACE = r"[ \n\t\r]{1,40}"
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_LIBRARY_KEY = "x-guidance"  # the library's options, of which clients may set one
_CHOICE = "whitespace_flexible"
_ESCAPED_OR_MARK = re.compile(r"\\.|[/\n]", re.DOTALL)
# In the library's units: about 20 ms to compile, 15 ms a token and 50 MB, at most.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


def compile_form(form: AnswerForm, vocabulary: Any) -> Any:
    """An LLMatcher at the start of a text that has the form.

    vocabulary: an LLTokenizer. Raises RequestError for text that is no schema or no regular
    expression, and for one that needs unknown features, exceeds the limits or describes no text at
    all. Some schemas of a few hundred bytes never finish compiling; `tpdet.grammar.trial` finds
    them.
    """
    library = import_library()
    body = f"%json {_schema(form.text)}" if form.kind == "json_schema" else _regex(form.text)
    # With any division of the text into tokens allowed.
    text = f'%llguidance {{"no_forcing": true}}\nstart: {body}'
    limits = library.LLParserLimits(**_LIMITS)
    matcher = library.LLMatcher(vocabulary, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some faults show only here
    if matcher.is_error():
        reason = one_line(matcher.get_error())
        if form.kind == "json_schema":
            reason = with_place(reason, json.loads(form.text))
        raise RequestError(f"the {form.noun} cannot be used: {reason}", form.field)
    return matcher


def _schema(schema: str) -> str:
    """The schema with the library's options."""
    try:
        value = json.loads(schema, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not JSON: {error}", FIELD) from None
    if not isinstance(value, dict):
        raise RequestError("the schema must be a JSON object", FIELD)
    flexible = _flexible(value.pop(_LIBRARY_KEY, {}))
    try:
        value = rewritten(value)
    except RecursionError:
        raise RequestError("the schema is nested too deep: flatten it", FIELD) from None
    options: dict[str, object] = {"lenient": False}
    options |= {"whitespace_pattern": _WHITESPACE} if flexible else _COMPACT
    return json.dumps(value | {_LIBRARY_KEY: options})


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        shown = shortened(literal, 40)
        raise RequestError(f"the schema has the number {shown}, which is not finite", FIELD)
    return number


def _regex(regex: str) -> str:
    """The regular expression between slashes, its own slashes escaped."""

    def escaped(found: re.Match[str]) -> str:
        return {"/": r"\/", "\n": r"\n"}.get(found[0][-1], found[0])

    return f"/{re.sub(_ESCAPED_OR_MARK, escaped, regex)}/"


def _flexible(options: object) -> bool:
    """Whether the schema allows blanks between the tokens of JSON; False by default."""
    if not isinstance(options, dict) or set(options) - {_CHOICE}:
        raise RequestError(
            f"the schema's key {_LIBRARY_KEY!r} may hold {_CHOICE!r} alone: leave the rest out",
            FIELD,
        )
    flexible = options.get(_CHOICE, False)
    if not isinstance(flexible, bool):
        raise RequestError(f"{_LIBRARY_KEY}.{_CHOICE} must be true or false", FIELD)
    return flexible
