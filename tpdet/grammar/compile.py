"""Compiles the form of an answer to a grammar of the llguidance library, within fixed limits.

The library is imported for the first form; who asks for none does not need it.
"""

import json
from collections.abc import Mapping
from typing import Any

from tpdet.errors import RequestError
from tpdet.grammar.byte_texts import import_library
from tpdet.grammar.explain import one_line, with_place
from tpdet.grammar.schema_options import schema_with_options
from tpdet.grammar.tool_calls import FREE_TOKENS, CallForm, grammar_of, lark_regex
from tpdet.requests.answer_form import FIELDS, AnswerForm

# In the library's units: about 20 ms to compile, 15 ms a token and 50 MB, at most.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


def compile_form(form: AnswerForm, vocabulary: Any, marks: Mapping[str, int] | None = None) -> Any:
    """An LLMatcher at the start of a text that has the form.

    vocabulary: an LLTokenizer; marks: of tool calls, the ids of those that are tokens in it.
    Raises RequestError for text that is no schema or no regular expression, and for one that needs
    unknown features, exceeds the limits or describes no text at all. Some schemas of a few hundred
    bytes never finish compiling; `tpdet.grammar.trial` finds them.
    """
    if form.kind == "tool_calls":
        return _compile_calls(form, vocabulary, marks or {})
    schema = form.kind == "json_schema"
    body = f"%json {schema_with_options(form.text)}" if schema else lark_regex(form.text)
    matcher = _matcher(f"{FREE_TOKENS}\nstart: {body}", vocabulary)
    if matcher.is_error():
        reason = one_line(matcher.get_error())
        if form.kind == "json_schema":
            reason = with_place(reason, json.loads(form.text))
        raise RequestError(f"the {form.noun} cannot be used: {reason}", form.field)
    return matcher


def marks_of(form: AnswerForm) -> tuple[str, ...]:
    """Texts that are tokens in this form, where the tokenizer has them."""
    return CallForm.of(form.text).marks if form.kind == "tool_calls" else ()


def _compile_calls(form: AnswerForm, vocabulary: Any, marks: Mapping[str, int]) -> Any:
    calls = CallForm.of(form.text)
    grammar = grammar_of(calls, marks)
    for tool, schema in dict.fromkeys(grammar.schemas):
        alone = _matcher(f"{FREE_TOKENS}\nstart: %json {schema}", vocabulary)
        if alone.is_error():
            of = calls.content if tool is None else calls.schemas[tool]
            reason = with_place(one_line(alone.get_error()), of or {})
            if tool is None:
                raise RequestError(f"the schema cannot be used: {reason}", FIELDS["json_schema"])
            raise RequestError(f"the parameters of tool {tool!r:.80}: {reason}", form.field)
    matcher = _matcher(grammar.text, vocabulary)
    if matcher.is_error():
        reason = one_line(matcher.get_error())
        raise RequestError(f"the tools {[*calls.schemas]!r:.80}: {reason}", form.field)
    return matcher


def _matcher(text: str, vocabulary: Any) -> Any:
    """An LLMatcher of a grammar; some faults show only at its first mask."""
    library = import_library()
    limits = library.LLParserLimits(**_LIMITS)
    matcher = library.LLMatcher(vocabulary, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher
