"""Families of which canitoolcall has no outputs: what transformers' parser of responses reads."""

import json

import pytest

from tests.text.parsing import oracle
from tests.text.parsing.recorded_outputs import CutTokenizer
from tests.text.parsing.test_calls import MARKS
from tpdet.text.parsing.calls import CallParser, output_parser
from tpdet.text.parsing.events import Message

OUTPUTS = json.loads(oracle.FILE.read_text())


@pytest.mark.parametrize("family", OUTPUTS)
def test_outputs_are_read_as_the_oracle_reads_them(family):
    assert len(OUTPUTS[family]) == 20
    for output in OUTPUTS[family]:
        marks = {mark: i for i, mark in enumerate(MARKS[family], 5)}
        tokenizer = CutTokenizer.cut(marks, output["text"], range(0, len(output["text"]), 3))
        parser = output_parser(tokenizer, [], None, CallParser(family, tokenizer), oracle.TOOLS)
        events = parser.feed(tokenizer.ids, tokenizer.texts(tokenizer.ids)) + parser.finish()
        message = Message.of(events)
        calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in message.calls]
        assert {"content": message.content, "calls": calls} == {
            "content": output["content"],
            "calls": output["calls"],
        }, output["text"]


@pytest.mark.slow
def test_the_file_is_what_the_oracle_reads():
    pytest.importorskip("transformers.utils.chat_parsing")
    for family, recorded in OUTPUTS.items():
        texts = oracle.outputs(family)
        assert recorded == [{"text": text} | oracle.read(family, text) for text in texts]
