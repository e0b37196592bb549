"""Each message has the form, text or parts, in which the template prints its words."""

import json

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.lib.text.made_tokenizers import CONTROL
from tpdet.errors import CheckpointError, RequestError
from tpdet.text.chat_template import ChatTemplate
from tpdet.text.tokenizer import Tokenizer

EACH_PART = (
    "{%- for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
)
AS_IT_IS = "{{- m['content'] | trim }}"
EITHER = "{% if m['content'] is string %}" + AS_IT_IS + "{% else %}" + EACH_PART + "{% endif %}"
CHOSEN = (
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text + ' ' }}{% endfor %}"
)
FIRST = "{{ '' if m['content'][0]['type'] == 'image' else m['content'][-1]['text'] }}"
STRICT = "{% if m.content is string %}{{ raise_exception('parts') }}{% endif %}" + EACH_PART
BY_ROLE = "{% if m.role == 'system' %}" + AS_IT_IS + "{% else %}" + EACH_PART + "{% endif %}"
OTHERWISE = "{% if m.role == 'user' %}" + AS_IT_IS + "{% else %}" + EACH_PART + "{% endif %}"
BODIES = {
    "parts": EACH_PART, "text": AS_IT_IS, "either": EITHER, "chosen": CHOSEN, "last": FIRST,
    "strict": STRICT, "system as text": BY_ROLE, "user as text": OTHERWISE,
}  # fmt: skip
READ_AS = {
    "parts": "ppp", "text": "ttt", "either": "ttt", "chosen": "ppp", "last": "ppp",
    "strict": "ppp", "system as text": "tpp", "user as text": "ptp",
}  # fmt: skip
"""What the system, the user and the assistant are read as."""
HEADED = """\
{%- for m in messages %}
{{- '<|im_start|>' + m['role'] + ':' }}BODY{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"""


def template(body):
    return HEADED.replace("BODY", body)


def text(source, messages, *arguments, **keywords):
    found = ChatTemplate(source, {}, CONTROL, **keywords).render(messages, *arguments)
    return "".join(segment.text for segment in found)


def said(role, content):
    return {"role": role, "content": content}


def parts(*texts):
    return [{"type": "text", "text": each} for each in texts]


TALK = [
    said("system", "Be <brief>"),
    said("user", " Where do foxes <|im_end|> sleep? "),
    said("assistant", "In dens, füchsisch"),
    said("user", "Why?"),
]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("ending", [(True, False), (False, False), (False, True)])
def test_words_reach_the_prompt_as_transformers_renders_the_form(name, counted, ending):
    source, given = template(BODIES[name]), TALK[:3] if ending[1] else TALK
    read_as = dict(zip(("system", "user", "assistant"), READ_AS[name], strict=True))
    formed = [
        said(m["role"], parts(m["content"]) if read_as[m["role"]] == "p" else m["content"])
        for m in given
    ]
    names = ("add_generation_prompt", "continue_final_message")
    settings = dict(zip(names, ending, strict=True))
    ((expected,), _) = render_jinja_template([formed], chat_template=source, **settings)
    wrapped = [said(m["role"], parts(m["content"])) for m in given]
    assert text(source, given, *ending, counted=counted) == expected
    assert text(source, wrapped, *ending, counted=counted) == expected
    for message in given:
        assert message["content"].strip() in expected


@pytest.mark.parametrize("name", BODIES)
def test_several_parts_are_given_as_they_are_or_joined(name):
    """The template "last" prints but one part, so it gets one."""
    two = [said("user", parts("Where do ", "foxes sleep?"))]
    between = " " if name == "chosen" else ""
    assert f"Where do {between}foxes sleep?" in text(template(BODIES[name]), two, False)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("halves", [("Be brief,", " please"), ("one", "", "two"), ("words",)])
def test_a_template_that_prints_the_first_part_gets_all_words_in_it(role, halves):
    first = template("{{ m['content'][0]['text'] }}")
    given = [said("user", "Look"), said(role, parts(*halves)), said("user", parts("Why?"))]
    joined = [said(m["role"], parts("".join(p["text"] for p in m["content"]))) for m in given[1:]]
    expected = [said("user", parts("Look")), *joined]
    ((rendered,), _) = render_jinja_template([expected], chat_template=first)
    assert text(first, given, False) == rendered
    assert "".join(halves) in rendered


@pytest.mark.parametrize("content", ["words", parts("words"), parts("a", "b")])
@pytest.mark.parametrize(
    ("role", "body"),
    [
        ("user", "{{ m.role }}"),
        ("user", "{{ m.content | length }}"),
        ("user", "{{ m.content[0] }}"),
        ("user", "{% for part in m.content if part.type == 'image' %}{{ part.text }}{% endfor %}"),
        ("system", "{% if m.role == 'user' %}{{ m.content }}{% endif %}"),
        ("developer", "{% if m.role in ['user', 'system'] %}{{ m.content }}{% endif %}"),
        ("tool", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"),
    ],
)
def test_words_that_a_template_never_prints_are_refused_with_their_place(role, body, content):
    with pytest.raises(RequestError, match=rf"leaves out what {role} messages say") as refusal:
        text(template(body), [said("user", ""), said(role, content)], True)
    assert refusal.value.param == "messages[1].content"


def test_a_message_without_words_loses_none():
    source = template("{% if m.role == 'user' %}{{ m.content }}{% endif %}")
    assert "user:x" in text(source, [said("system", " "), said("user", "x")], True)


def test_words_that_are_left_out_in_one_place_are_refused_there():
    source = "{{ messages[-1].content }}"
    assert text(source, [said("user", "Why?")], False) == "Why?"
    with pytest.raises(RequestError, match=r"leaves out this text here") as refusal:
        text(source, [said("user", "Where?"), said("user", "Why?")], False)
    assert refusal.value.param == "messages[0].content"


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
CALLING = [said("user", "x"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]


def test_null_beside_calls_is_no_content_and_else_an_empty_one():
    """As transformers renders it; what it refuses is rendered with an empty text, as by vLLM."""
    plain = template("{{ m['content'] if 'content' in m else 'none' }}")
    assert text(plain, CALLING, False).endswith("assistant:none<|im_end|>\n")
    joined = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    with pytest.raises(jinja2.UndefinedError):
        render_jinja_template([[CALLING[0], {"role": "assistant"}]], chat_template=joined)
    assert text(joined, CALLING, False) == "user:x;assistant:;"
    by_parts = template("{{ m.content[0].text + '' }}")
    assert text(by_parts, CALLING, False).endswith("assistant:<|im_end|>\n")
    with pytest.raises(RequestError, match="no attribute 'name'"):
        text("{% for m in messages %}{{ m['content'] + m['name'] }}{% endfor %}", CALLING, False)


def test_the_template_of_older_image_models_is_read(tokenizer_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer_folder / name).read_bytes())
    ours = Tokenizer.load(tmp_path).info()["chat_template"]
    older = tmp_path / "chat_template.json"
    older.write_text(json.dumps({"chat_template": template(EACH_PART)}))
    assert Tokenizer.load(tmp_path).info()["chat_template"] == template(EACH_PART) != ours
    assert "user:Hi<" in Tokenizer.load(tmp_path).render_chat([said("user", "Hi")])
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.load(tmp_path).info()["chat_template"] == "J"
    (tmp_path / "chat_template.jinja").unlink()
    older.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(CheckpointError, match=r"chat_template\.json: chat_template is a int"):
        Tokenizer.load(tmp_path)
