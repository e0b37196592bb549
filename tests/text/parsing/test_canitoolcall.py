"""Recorded outputs of canitoolcall, read whole and in each of its splits: none may fail."""

import re
from collections import Counter

import pytest
from canitoolcall.checks import case_status, run_checks
from canitoolcall.chunking import DEFAULT_STRATEGIES, split
from canitoolcall.fixtures import load_fixtures
from canitoolcall.pytest_plugin import family_for
from canitoolcall.results import Observation, ParsedToolCall, ParseResult

from tests.text.parsing.recorded_outputs import CutTokenizer
from tpdet.text.parsing.calls import CallParser, output_parser
from tpdet.text.parsing.events import Message
from tpdet.text.parsing.reasoning import ReasoningParser


def _numbered(first, *marks):
    return {mark: first + i for i, mark in enumerate(marks)}


_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
_ARGUMENT = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_QWEN3 = _numbered(151657, *_CALL) | _numbered(151667, *_THINK)
_QWEN35 = _numbered(248058, *_CALL) | _numbered(248068, *_THINK)
_GLM45 = _numbered(151350, *_THINK, *_CALL) | _numbered(151356, *_ARGUMENT)
_GLM53 = _numbered(154841, *_THINK, *_CALL) | _numbered(154847, *_ARGUMENT)
_TEKKEN = {
    "[TOOL_CALLS]": 9, "[ARGS]": 32, "[CALL_ID]": 33, "[THINK]": 34, "[/THINK]": 35,
}  # fmt: skip
_V11 = {mark: id_ for mark, id_ in _TEKKEN.items() if "THINK" not in mark}
_LLAMA3 = {
    "<|python_tag|>": 128010, "<|start_header_id|>": 128006, "<|end_header_id|>": 128007,
}  # fmt: skip
_HARMONY = {
    "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008, "<|channel|>": 200005,
    "<|constrain|>": 200003, "<|return|>": 200002, "<|call|>": 200012,
}  # fmt: skip
READ_BY = {
    "qwen3-hermes": [("", _QWEN3, "hermes")],
    "qwen3-xml": [("Coder", _QWEN3, "qwen3_coder"), ("", _QWEN35, "qwen3_coder")],
    "glm": [("GLM-5", _GLM53, "glm47"), ("GLM-4.7", _GLM45, "glm47"), ("", _GLM45, "glm45")],
    "llama": [
        ("Llama-3", _LLAMA3, "llama3_json"),
        ("", _numbered(200016, "<|python_start|>", "<|python_end|>"), "pythonic"),
    ],
    "mistral": [
        ("v0.3", {"[TOOL_CALLS]": 5}, "mistral"),
        ("Magistral-Small-2506", _V11, "mistral"),
        ("", _TEKKEN, "mistral"),
    ],
    "gpt-oss": [("", _HARMONY, "openai")],
}
"""For each of their families: a model's pattern, its marks, and the name of its calls' parser."""

FIXTURES = [fixture for fixture in load_fixtures(None) if fixture.family in READ_BY]


def reader_of(fixture):
    """An output's tokens and marks, and what makes a parser of it."""
    rows = READ_BY[fixture.family]
    _, marks, calls = next(row for row in rows if re.search(row[0], fixture.models[0]))
    tokenizer = CutTokenizer(marks, fixture.raw_output, fixture.output_token_ids)
    by_default = family_for(fixture).reference_for(fixture.reference_model)
    begin = fixture.generation_prompt or by_default.default_generation_prompt
    prompt = tokenizer.prompt(begin)
    functions = [tool["function"] for tool in fixture.tools]
    tools = {function["name"]: function.get("parameters") or {} for function in functions}
    reasoning = ReasoningParser.of("text_think" if calls == "mistral" else "auto", tokenizer)
    calls = CallParser(calls, tokenizer)
    return tokenizer, marks, lambda: output_parser(tokenizer, prompt, reasoning, calls, tools)


def observed(fixture) -> Observation:
    """What is read of an output: whole, and in each split."""
    tokenizer, marks, parser_of = reader_of(fixture)

    def read(groups):
        parser = parser_of()
        events = [event for ids in groups for event in parser.feed(ids, tokenizer.texts(ids))]
        message = Message.of(events + parser.finish())
        called = tuple(ParsedToolCall(call.name, call.arguments) for call in message.calls)
        return ParseResult(message.content or None, message.reasoning or None, called)

    streams = {
        strategy.id: read(split(tokenizer.ids, strategy, special=marks.values()))
        for strategy in DEFAULT_STRATEGIES
    }
    return Observation(read([tokenizer.ids]), streams)


def status_of(fixture):
    """pass, soft_pass (space around texts differs) or fail, and what failed."""
    rows = run_checks(fixture, family_for(fixture), observed(fixture))
    failed = [f"{row.check}[{row.strategy}]: {row.detail}" for row in rows if row.detail]
    return case_status(rows).value, failed


@pytest.mark.parametrize("family", READ_BY)
def test_no_recorded_output_of_a_family_fails(family, record_property):
    found = {f.id: status_of(f) for f in FIXTURES if f.family == family}
    counts = Counter(status for status, _ in found.values())
    print(family, dict(counts))
    record_property("counts", dict(counts))
    failed = {id_: why for id_, (status, why) in found.items() if "pass" not in status}
    assert not failed, "\n".join(f"{id_}: {why[:1]}" for id_, why in failed.items())


def test_the_families_are_those_of_the_models_that_run():
    assert len(FIXTURES) == 287
