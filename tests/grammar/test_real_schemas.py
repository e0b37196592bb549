"""Schemas of tools as public servers declare them, `strict`: what is drawn is valid, or refused.

`tool_schemas.json` has those that ten servers list, without titles and descriptions, which no
grammar reads; the others are those of canitoolcall's fixtures.
"""

import collections
import json
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest
from canitoolcall.fixtures import load_fixtures

from tests.grammar.grammar_walks import walk_ids
from tests.lib.server.harness import write_tokenizer
from tpdet.errors import RequestError
from tpdet.grammar.byte_texts import byte_vocabulary, import_library
from tpdet.grammar.compile import compile_form
from tpdet.grammar.layouts import LAYOUTS
from tpdet.grammar.tool_calls import CallForm
from tpdet.requests.answer_form import AnswerForm
from tpdet.text.detokenizer import IncrementalDetokenizer
from tpdet.text.parsing.calls import CallParser, output_parser
from tpdet.text.parsing.events import Message
from tpdet.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WALKS, LONGEST = 3, 4000
FORMS = ("hermes", "glm47")
"""Layouts: arguments as JSON, and between tags."""
FILE = Path(__file__).with_name("tool_schemas.json")


class RealTool(NamedTuple):
    source: str
    name: str
    schema: dict


def real_tools():
    """Tools whose schemas differ."""
    found = {}
    for server in json.loads(FILE.read_text()):
        assert server["licence"] in ("MIT", "Apache-2.0")
        for name, schema in server["tools"].items():
            found[json.dumps(schema)] = RealTool(server["source"], name.replace("-", "_"), schema)
    for fixture in load_fixtures():
        for declared in fixture.tools or ():
            tool = declared.get("function", declared)
            if schema := tool.get("parameters"):
                found[json.dumps(schema)] = RealTool("canitoolcall", tool["name"], schema)
    return [*found.values()]


TOOLS = real_tools()


def compiled(tool, layout):
    """The matcher of one call of a tool, over bytes and marks."""
    form = CallForm(layout, True, False, {tool.name: tool.schema})
    marks = {mark: 257 + i for i, mark in enumerate(form.marks)}
    return compile_form(AnswerForm("tool_calls", form.text), byte_vocabulary(form.marks), marks)


def refusal_of(tool, layout):
    """Why a tool is refused; None where it is not."""
    try:
        compiled(tool, layout)
    except RequestError as error:
        return str(error)
    return None


def library_refusal(schema):
    """What the library says of a schema as it is."""
    matcher = import_library().LLMatcher
    grammar = matcher.grammar_from_json_schema(json.dumps(schema))
    found = matcher(byte_vocabulary(), grammar, log_level=0)
    if not found.is_error():
        found.compute_bitmask()
    return found.get_error() if found.is_error() else None


def test_there_are_500():
    assert len(TOOLS) >= 500


@pytest.mark.parametrize("layout", FORMS)
def test_what_the_library_refuses_is_refused_by_its_keyword(layout):
    found = collections.defaultdict(list)
    for tool in TOOLS:
        ours, theirs = refusal_of(tool, layout), library_refusal(tool.schema)
        found[ours is None, theirs is None].append((tool.name, ours, theirs))
    print(layout, {key: len(value) for key, value in found.items()}, "(taken here, by the library)")
    assert not found[False, True], found[False, True]
    # Keys of which is said only that they are texts.
    assert all("propertyNames" in theirs for *_, theirs in found[True, False])
    ((name, ours, _),) = found[False, False]
    assert name == "API_post_page" and "oneOf is not supported: its branches" in ours


@pytest.mark.parametrize("layout", FORMS)
def test_what_is_drawn_is_valid(tmp_path, layout):
    marks = LAYOUTS[layout].marks
    write_tokenizer(tmp_path, marks=marks)
    tokenizer = Tokenizer.load(tmp_path)
    counts, wrong = collections.Counter(), []
    for number, tool in enumerate(TOOLS):
        if refusal_of(tool, layout) is not None:
            counts["refused"] += 1
            continue
        start = compiled(tool, layout)
        checker = jsonschema.validators.validator_for(tool.schema)(tool.schema)
        for seed in range(WALKS):
            drawn = walk_ids(start, WALKS * number + seed, LONGEST, len(marks))
            if drawn is None:
                counts["too long"] += 1
                continue
            ids = [t if t < 256 else tokenizer.added_tokens[marks[t - 257]] for t in drawn]
            errors = _errors(tokenizer, CallParser(layout, tokenizer), ids, tool, checker)
            counts["invalid" if errors else "valid"] += 1
            if errors:
                wrong.append((tool.source, tool.name, errors[:1], tokenizer.decode(ids, False)))
    print(layout, dict(counts))
    assert not wrong, wrong[:20]
    assert counts["valid"] > 0.9 * WALKS * len(TOOLS)


def _errors(tokenizer, parser, ids, tool, checker):
    """What is wrong with the one call that is read of an output."""
    texts = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    reader = output_parser(tokenizer, [], None, parser, {tool.name: tool.schema})
    events = [*reader.feed(ids, [texts.push(token) for token in ids]), *reader.finish()]
    message = Message.of(events)
    if len(message.calls) != 1:
        return ["no call"]
    return [error.message for error in checker.iter_errors(json.loads(message.calls[0].arguments))]
