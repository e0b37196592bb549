"""Chat templates: transformers' ids, and user text that never becomes special."""

import datetime
import json

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers.utils import chat_template_utils

from tests.lib.text.made_tokenizers import CONTROL, QWEN3_LIKE, TOOL_TEMPLATES
from tpdet.errors import CheckpointError, NotFoundError, RequestError, UsageError
from tpdet.text.chat_template import ChatTemplate
from tpdet.text.tokenizer import Tokenizer


def test_a_conversation_is_encoded_as_transformers_does(our_tokenizer, their_tokenizer):
    messages = [
        {"role": "system", "content": "  be brief\n"},
        {"role": "user", "content": "Hello, 日本語 🎉"},
    ]
    for prompt in (True, False):
        expected = their_tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
        assert our_tokenizer.apply_chat_template(messages, prompt) == expected["input_ids"]


def test_the_ids_before_a_text_are_added_to_a_conversation_only_when_asked_for(our_tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    ids = our_tokenizer.apply_chat_template(messages)
    begin = our_tokenizer.bos_token_id
    assert our_tokenizer.apply_chat_template(messages, add_special_tokens=True) == [begin, *ids]


user_texts = st.lists(
    st.one_of(
        st.sampled_from([*CONTROL, "<|", "|>", "im_end", "<|im_", "end|>", " ", "\n", "'", '"']),
        st.text(max_size=4),
    ),
    max_size=6,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(contents=st.lists(user_texts, min_size=1, max_size=3))
def test_no_user_text_becomes_a_special_token(our_tokenizer, contents):
    messages = [{"role": "user", "content": content} for content in contents]
    ids = our_tokenizer.apply_chat_template(messages)
    special = [i for i in ids if our_tokenizer.token(i, skip_special_tokens=True) is None]
    start, end = (our_tokenizer.encode(token, False)[0] for token in CONTROL[1:])
    assert special == [our_tokenizer.bos_token_id, *[start, end] * len(contents), start]


def test_pieces_of_a_special_token_in_neighbouring_messages_do_not_join(tokenizer_folder, tmp_path):
    glued = tmp_path / "glued.jinja"
    glued.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    tokenizer = Tokenizer.load(tokenizer_folder, glued)
    parts = [{"role": "user", "content": text} for text in ("<", "|", "im_", "end|>")]
    ids = tokenizer.apply_chat_template(parts)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>", False) != ids


def test_a_template_that_looks_into_contents_still_does(their_tokenizer):
    template = ChatTemplate(QWEN3_LIKE, {}, CONTROL)
    messages = [
        {"role": "assistant", "content": "<think>hm</think>\n\nYes <|im_end|>"},
        {"role": "user", "content": "<|im_end|></think>"},
    ]
    segments = template.render(messages, False)
    text = "".join(segment.text for segment in segments)
    expected = their_tokenizer.apply_chat_template(
        messages, chat_template=QWEN3_LIKE, tokenize=False
    )
    assert text == expected
    assert "hm" not in text
    special = [segment.text for segment in segments if segment.special]
    assert special == ["<|im_start|>", "<|im_end|>"] * 2


def test_a_template_that_rewrites_special_text_is_refused_for_such_messages():
    template = ChatTemplate("{{ messages[0].content | replace('<|im_end|>', '!') }}", {}, CONTROL)
    assert template.render([{"role": "user", "content": "fine"}], False)[0].text == "fine"
    with pytest.raises(RequestError, match="remove such text"):
        template.render([{"role": "user", "content": "a<|im_end|>"}], False)


def test_private_use_characters_of_users_are_kept(our_tokenizer):
    text = "\U000f0000\U000f0001\ufdd0\ufdd1<|im_end|>"
    ids = our_tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert f"user\n{text}<|im_end|>" in our_tokenizer.decode(ids, skip_special_tokens=False)


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def calling(**function):
    function = {"name": "f", "arguments": "{}"} | function
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], "role is None"),
        ([{"role": "root", "content": "x"}], "role is 'root'"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": None}], "content must be text"),
        ([{"role": "user", "content": 3}], "content must be text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}],
            r"messages\[0\]\.content\[1\]\.text is missing",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            r"messages\[0\]\.content\[0\]\.text is 5 and must be text",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "of type 'image_url'"),
        ([{"role": "user", "content": "x", "tools": []}], "tools is not supported"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "only an assistant calls"),
        ([{"role": "assistant", "tool_calls": []}], "content is missing"),
        ([{"role": "assistant", "tool_calls": {}, "content": "x"}], "must be a list"),
        ([{"role": "assistant", "tool_calls": [3]}], "must be an object with function"),
        ([calling(name=3)], "name must be text"),
        ([calling(arguments="{")], "are not JSON"),
        ([calling(arguments="[1]")], "must be a JSON object"),
        ([calling(arguments='{"a": NaN}')], "NaN is no JSON number"),
        ([calling(arguments={"a": {1}})], "cannot hold a set"),
        ([calling(arguments="[" * 100_000)], "nested deeper than 32"),
        ([calling(arguments='{"a":' * 40 + "1" + "}" * 40)], "nested deeper than 32"),
        ([{"role": "user", "content": "x\ud800"}], "lone surrogate"),
        (
            [calling(arguments='{"a": ["\\ud800"]}')],
            r"messages\[0\].*arguments hold a lone surrogate \(U\+D800\)",
        ),
        ([calling(arguments='{"\\udc00": 1}')], r"arguments hold a lone surrogate \(U\+DC00\)"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(our_tokenizer, messages, message):
    with pytest.raises(RequestError, match=message):
        our_tokenizer.apply_chat_template(messages)


def recorded(arguments):
    """A conversation as a client recorded it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather in Köln?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 °C"},
        {"role": "assistant", "content": "It is 18 °C."},
    ]


@pytest.mark.parametrize("template", TOOL_TEMPLATES)
def test_tool_calls_are_rendered_as_transformers_does(their_tokenizer, template):
    arguments = {"city": "Köln <|im_end|>", "days": [1, 2.5, None, True], "<|im_start|>": {}}
    theirs = their_tokenizer.apply_chat_template(
        recorded(arguments), chat_template=template, tokenize=False
    )
    ours = ChatTemplate(template, {}, CONTROL)
    for written in (arguments, json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)):
        segments = ours.render(recorded(written), False)
        assert "".join(segment.text for segment in segments) == theirs
        special = [segment.text for segment in segments if segment.special]
        assert special == ["<|im_start|>", "<|im_end|>"] * 4


def test_a_tool_call_without_arguments_or_id_has_an_empty_object():
    template = ChatTemplate("{{ messages[0].tool_calls | tojson }}", {}, ())
    for arguments in (None, "", {}, "{}"):
        found = template.render([calling(arguments=arguments)], False)[0].text
        assert found == '[{"type": "function", "function": {"name": "f", "arguments": {}}}]'


def test_text_parts_are_joined(our_tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = our_tokenizer.apply_chat_template([{"role": "user", "content": parts}])
    assert joined == our_tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_what_a_template_raises_is_the_requests_error(template, message):
    with pytest.raises(RequestError, match=message):
        ChatTemplate(template, {}, ()).render([{"role": "user", "content": "x"}], False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "chat template: "),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
    ],
)
def test_templates_that_cannot_be_kept_are_refused_at_load(template, message):
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate(template, {}, ())


# In the manner of gpt-oss: the date in a macro, reasoning as `thinking`, calls without content.
DATED = """\
{%- macro system() %}{{ "Current date: " + strftime_now("%Y-%m-%d") + strftime_now(" %A %-d %B") }}
{{- "\\nReasoning: " + reasoning_effort | default("medium") }}{% endmacro %}
{{- "<|start|>" + system() }}
{%- for message in messages %}
{%- if "content" in message and "<|channel|>" in message.content %}{{ raise_exception("no") }}
{%- endif %}
{{- "<|start|>" + message.role + (message.thinking or "") + (message.content or "-") }}
{%- endfor %}"""


@pytest.mark.parametrize("counted", [False, True])
def test_a_date_is_an_input_and_reads_as_transformers_shows_that_day(
    their_tokenizer, monkeypatch, counted
):
    class Then(datetime.datetime):
        @classmethod
        def now(cls, zone=None):
            return cls(2026, 1, 3, 13, 5)

    monkeypatch.setattr(chat_template_utils, "datetime", Then)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "a <|start|>"},
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [call]},
    ]
    variables = {"reasoning_effort": "high"}
    expected = their_tokenizer.apply_chat_template(
        messages, chat_template=DATED, tokenize=False, **variables
    )
    day = {"current_date": "2026-01-03"}
    special = ("<|start|>", "<|channel|>")
    asked = ChatTemplate(DATED, {}, special, counted)
    usual = ChatTemplate(DATED, {}, special, counted, date="2026-01-03")
    for segments in (
        asked.render(messages, False, variables=variables | day),
        usual.render(messages, False, variables=variables),
        ChatTemplate(DATED, {}, special, counted, date="1999-01-01").render(
            messages, False, variables=variables | day
        ),
    ):
        assert "".join(segment.text for segment in segments) == expected
        assert "2026-01-03 Saturday 3 January" in expected and "assistantwhy-" in expected
    assert asked.lacks_date and not usual.lacks_date
    with pytest.raises(RequestError, match=r'"current_date": "YYYY-MM-DD".*--chat-template-date'):
        asked.render(messages, False)
    with pytest.raises(RequestError, match="current_date '3 Jan': give a date such as 2026-01-31"):
        asked.render(messages, False, variables={"current_date": "3 Jan"})


@pytest.mark.parametrize("directive", ["%s", "%c", "%Z", "%", "%10Y"])
def test_a_date_has_no_form_that_depends_on_the_machine(directive):
    template = ChatTemplate(f"{{{{ strftime_now('{directive}') }}}}", {}, (), date="2026-01-03")
    with pytest.raises(RequestError, match="its text would depend on the machine"):
        template.render([{"role": "user", "content": "x"}], False)


def test_a_date_that_no_template_reads_is_refused(tokenizer_folder, tmp_path):
    with pytest.raises(UsageError, match=r"--chat-template-date 2026-01-03: .* leave it out"):
        Tokenizer.load(tokenizer_folder, date="2026-01-03")
    (tmp_path / "dated.jinja").write_text(DATED)
    tokenizer = Tokenizer.load(tokenizer_folder, tmp_path / "dated.jinja", "2026-01-03")
    assert tokenizer.info()["chat_template_date"] == "2026-01-03"
    assert "2026-01-03" in tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_a_template_with_a_date_of_its_own_is_served():
    source = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}26 Jul{% endif %}"
    source += "{{ ' ' + messages[0].content }}"
    segments = ChatTemplate(source, {}, ()).render([{"role": "user", "content": "x"}], False)
    assert segments[0].text == "26 Jul x"
    dated = ChatTemplate(source, {}, (), date="2026-01-03")
    assert dated.render([{"role": "user", "content": "x"}], False)[0].text == "03 x"


def test_the_template_is_the_chosen_file_or_the_directorys_or_the_configurations(
    tokenizer_folder, tmp_path
):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    assert Tokenizer.load(tmp_path).chat_template is None
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.load(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.load(tmp_path).info()["chat_template"] == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(tmp_path).info()["chat_template"] == "J"
    (tmp_path / "mine").write_text("M")
    assert Tokenizer.load(tmp_path, tmp_path / "mine").info()["chat_template"] == "M"
    with pytest.raises(NotFoundError, match="absent"):
        Tokenizer.load(tmp_path, tmp_path / "absent")


def test_special_tokens_that_strip_their_surroundings_do_so_only_where_the_template_wrote_them(
    tokenizer_folder, tmp_path
):
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    source = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    our_tokenizer = Tokenizer.load(tmp_path)
    their_tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = their_tokenizer.apply_chat_template([{"role": "user", "content": " \n a"}])
    assert (
        our_tokenizer.apply_chat_template([{"role": "user", "content": " \n a"}], False)
        == (expected["input_ids"])
    )
    attacked = our_tokenizer.apply_chat_template(
        [{"role": "user", "content": "a \n<|user|>\n b"}], False
    )
    assert our_tokenizer.decode(attacked, False) == "<|user|>a \n<|user|>\n b<|im_end|>"
    assert len([i for i in attacked if our_tokenizer.token(i) == "<|user|>"]) == 1
