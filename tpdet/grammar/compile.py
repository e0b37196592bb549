"""Compiles a JSON schema to a grammar of the llguidance library, within fixed limits.

The library is imported for the first schema; who sends none does not need it.
"""

import json
from typing import Any

from tpdet.errors import RequestError

FIELD = "response_format"
# Blanks between JSON tokens are limited: a model could write them until it runs out of tokens.
_WHITESPACE = r"[ \n\t\r]{1,40}"
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_LIBRARY_KEY = "x-guidance"  # the library's options, of which clients may set one
_CHOICE = "whitespace_flexible"
# In the library's units: about 20 ms to compile, 15 ms a token and 50 MB, at most.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


def import_library() -> Any:
    """The llguidance module. Raises RequestError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "response_format needs the llguidance package, which this server has not installed",
            FIELD,
        ) from None
    return llguidance


def compile_schema(schema: str, vocabulary: Any) -> Any:
    """An LLMatcher at the start of a text that `schema` (JSON text) describes.

    vocabulary: an LLTokenizer. Raises RequestError for text that is no schema, and for a schema
    that needs unknown features, exceeds the limits or describes no text at all. Some schemas of a
    few hundred bytes never finish compiling; `tpdet.grammar.trial` finds them.
    """
    library = import_library()
    text = _grammar(schema)
    limits = library.LLParserLimits(**_LIMITS)
    matcher = library.LLMatcher(vocabulary, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some faults show only here
    if matcher.is_error():
        raise RequestError(f"the schema cannot be used: {_reason(matcher.get_error())}", FIELD)
    return matcher


def _grammar(schema: str) -> str:
    """The schema in the library's syntax, with any division of the text into tokens allowed."""
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not JSON: {error}", FIELD) from None
    if not isinstance(value, dict):
        raise RequestError("the schema must be a JSON object", FIELD)
    flexible = _flexible(value.pop(_LIBRARY_KEY, {}))
    options: dict[str, object] = {"lenient": False}
    options |= {"whitespace_pattern": _WHITESPACE} if flexible else _COMPACT
    body = json.dumps(value | {_LIBRARY_KEY: options})
    return f'%llguidance {{"no_forcing": true}}\nstart: %json {body}'


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


def _reason(error: str) -> str:
    """The library's message without its position, its listing and its second line."""
    return error.rpartition("failed to compile JSON schema: ")[2].partition("\n")[0][:200]
