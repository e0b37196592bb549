"""Templates whose work is counted: the same text where it is little, none where it is not."""

import time

import pytest

from tests.lib.text.made_tokenizers import CONTROL, QWEN3_LIKE, TOOL_TEMPLATES
from tpdet.errors import CheckpointError, RequestError
from tpdet.text.chat_template import ChatTemplate
from tpdet.text.template_meter import BeyondCount

LLAMA_LIKE = """\
{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if not date is defined %}{% if strftime_now is defined %}{% set date = strftime_now('%d') %}
{%- else %}{% set date = '26 Jul 2024' %}{% endif %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|im_start|>system\\n' }}{% if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}
{{- 'Today: ' + date + '\\n\\n' ~ system }}<|im_end|>
{%- set last = namespace(index=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
{%- if not last.found and message.role == 'user' and not
    (message.content.startswith('<t>') and message.content.endswith('</t>')) %}
{%- set last.index = messages | length - 1 - loop.index0 %}{% set last.found = true %}
{%- endif %}{% endfor %}
{%- macro head(role) -%}<|im_start|>{{ role }}{{ '\\n' }}{%- endmacro %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) and false %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- head(message.role) }}
{%- if loop.index0 > last.index and loop.last or not loop.first %}{{ '' }}{% endif %}
{%- if message.role == 'assistant' and '</think>' in message.content %}
{{- message.content.split('</think>')[-1].strip() }}
{%- else %}{{ message['content'] | trim | replace('\\r\\n', '\\n') }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | list %}
{{- users | join(',') | upper }}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""
ORDINARY = [
    QWEN3_LIKE,
    LLAMA_LIKE,
    *TOOL_TEMPLATES,
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    "{% for m in messages if m.role != 'tool' %}{{ m.content }}"
    "{{ loop.index }}{{ m.content | length }}{{ m.items() | list | length }}"
    "{% else %}x{% endfor %}",
]


def conversation(turns, text="Hello <|im_end|> you"):
    roles = ("user", "assistant")
    turn = [{"role": roles[i % 2], "content": f"{text} {i}"} for i in range(turns)]
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": [1, "x"]}'},
    }
    calls = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    return [{"role": "system", "content": " Be brief. "}, *turn], calls


@pytest.mark.parametrize("source", ORDINARY)
@pytest.mark.parametrize("turns", [1, 2, 7, 400])
def test_an_ordinary_template_gives_the_same_with_and_without_a_count(source, turns):
    messages, calls = conversation(turns)
    messages += calls if source in TOOL_TEMPLATES else []
    named = {"bos_token": "<s>"}
    plain = ChatTemplate(source, named, CONTROL).render(messages, True)
    assert ChatTemplate(source, named, CONTROL, counted=True).render(messages, True) == plain
    assert len(plain) > 0


BOMBS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "slice": "{{ messages | slice(10**9) | list }}",
    "wordwrap": "{{ ('ab ' * 400000) | wordwrap(1) }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "long product": "{{ 'a' * 10**10 }}",
    "product of numbers": "{% set n = namespace(x=3) %}{% for i in range(9999) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "doubled": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by sharing": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "doubled block": "{% set x = 'aaaa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "doubled by join": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "doubled by a method": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}"
    "{% set n.x = n.x.join(['', n.x, '']) %}{% endfor %}",
    "center": "{{ 'x' | center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "format": "{{ '{:>10000000000}'.format('x') }}",
    "percent": "{{ '%10000000000s' % 'x' }}",
    "indent": "{{ [1] | tojson(indent=10**9) }}",
    "replace": "{% set x = 'a' | replace('', 'b' * 1) %}"
    "{% for i in range(9) %}{{ ('aaaaaaaaaa' * 99999).replace('a', 'b' * 99999) }}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "range": "{% for i in range(9999) %}{{ range(99999) | reject | first }}{% endfor %}",
    "sum": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "in": "{% for i in range(99999) %}{{ 'x' in range(99999) }}{% endfor %}",
    "sliced": "{% set x = 'a' | replace('a', 'bbbbbbbbbb') %}{% for i in range(99999) %}"
    "{{ (range(99999) | list)[1:] | length }}{% endfor %}",
    "filters by name": "{{ range(9) | map('center', 10**9) | list }}",
    "own filters": "{% for i in range(99999) %}{{ messages | map('to be sized') | list | length }}"
    "{% endfor %}",
    "call block": "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}x{% endcall %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_more_than_is_counted_is_not_done_here(name):
    template = ChatTemplate(BOMBS[name], {}, CONTROL, counted=True)
    began = time.process_time()
    with pytest.raises(BeyondCount):
        template.render([{"role": "user", "content": "x" * 1000}], True)
    assert time.process_time() - began < 1.0


def test_a_template_cannot_change_its_count():
    for source in (
        "{{ [1] | map('counted -9 a time') | list }}",
        "{{ [1] | map('spent -9 a time') | list }}",
    ):
        template = ChatTemplate(source, {}, CONTROL, counted=True)
        with pytest.raises(RequestError, match="No filter named"):
            template.render([{"role": "user", "content": "x"}], True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ joiner() }}", "{{ messages[0].items }}", "{{ messages | map('upper') }}",
        "{{ raise_exception }}", "{{ 'x' ~ joiner() }}", "{{ joiner() | string }}",
        "{{ [joiner()] }}", "{{ {'a': joiner()} | string | length }}", "{{ '%s' % joiner() }}",
        "{{ '{}'.format(joiner()) }}", "{{ '{0.items!s:.40}'.format(messages[0]) }}",
        "{{ '{x}'.format_map({'x': joiner()}) }}", "{{ [joiner()] | join }}",
        "{{ messages | join(attribute='items') }}", "{{ [joiner()] | map('string') | list }}",
        "{{ namespace(x=joiner()) }}", "{{ joiner() | upper }}", "{{ joiner() | pprint }}",
        "{{ joiner() | escape }}", "{{ 'a' | replace('a', joiner()) }}", "{{ messages | reverse }}",
        "{{ '{:{0.items}}'.format(messages[0]) }}", "{{ [joiner()] | xmlattr }}",
        "{{ ['a'] | join(joiner()) }}", "{% set x %}{{ joiner() }}{% endset %}{{ x | length }}",
        "{{ {joiner(): 1} | tojson }}", "{{ [joiner()] | tojson }}", "{{ cycler('a') | trim }}",
        "{{ raise_exception(joiner()) }}", "{{ joiner() | int }}{{ joiner() | title }}",
        "{{ 'a'.join }}", "{{ messages[0].content.upper | list }}", "{{ 5 .bit_length }}",
    ],
)  # fmt: skip
def test_no_objects_address_becomes_text(source):
    try:
        template = ChatTemplate(source, {}, CONTROL)
    except CheckpointError:
        return  # not Jinja in the first place
    with pytest.raises(RequestError) as refused:
        template.render([{"role": "user", "content": "x"}], True)
    assert "0x7" not in str(refused.value)


def test_what_has_one_text_is_printed():
    source = (
        "{% macro m() %}{% endmacro %}{% for a in [1] %}{{ loop }}{% endfor %}{{ m }}{{ [1, 'a'] }}"
        "{{ namespace(a=1) }}{{ nothing }}{{ none }}{{ 1.5 }}{{ range(3) }}{{ {'a': 1}.items() }}"
        "{{ '{:.2f} {}'.format(1.234, 'x') }}{{ '%s' % 'a' }}{{ messages[0].content }}"
    )
    found = ChatTemplate(source, {}, ()).render([{"role": "user", "content": "x"}], True)
    assert "".join(s.text for s in found) == (
        "<LoopContext 1/1><Macro 'm'>[1, 'a']<Namespace {'a': 1}>None1.5range(0, 3)"
        "dict_items([('a', 1)])1.23 xax"
    )


@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% if 1 %}" * 500 + "{% endif %}" * 500,
     "{{ " + "-" * 50000 + "1 }}", "{{ " + "[" * 2000 + "]" * 2000 + " }}"],
)  # fmt: skip
def test_a_template_that_cannot_be_compiled_is_refused(source):
    with pytest.raises(CheckpointError, match="chat template: "):
        ChatTemplate(source, {}, ())


@pytest.mark.parametrize("source", ["{{ 'a' * 10**10 }}", "{{ 'x' | center(10**10) }}"])
def test_nothing_is_computed_when_a_template_is_loaded(source):
    began = time.process_time()
    ChatTemplate(source, {}, (), counted=True)
    assert time.process_time() - began < 1.0
