"""A chat template that takes for ever, or all memory, costs its own request alone: 400."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.lib.server.harness import MODEL, Server, refused

pytestmark = pytest.mark.alone
HOSTILE = """\
{%- if messages | length > 1 %}
{%- set kind = messages[1].content %}
{%- if kind == 'loops' %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif kind == 'slice' %}{{ messages | slice(10**9) | list | length }}
{%- elif kind == 'wordwrap' %}{{ ('ab ' * 400000) | wordwrap(1) | length }}
{%- elif kind == 'memory' %}{{ ('x' * 10**10) | length }}
{%- elif kind == 'center' %}{{ 'x' | center(10**10) | length }}
{%- elif kind == 'fine' %}{{ 'x' | center(300) | length }}
{%- elif kind == 'address' %}{{ joiner() }}
{%- endif %}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    template = folder / "hostile.jinja"
    template.write_text(HOSTILE)
    found = Server(folder, "--chat-template", str(template))
    yield found
    assert found.stop() == 0


def chat(server, *contents, path="/v1/chat/completions", **fields):
    messages = [{"role": "user", "content": content} for content in contents]
    return server.http.post(path, json={"model": MODEL, "messages": messages} | fields)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("loops", "took more than 5 s or 8 GiB"),
        pytest.param("slice", "took more than 5 s or 8 GiB", marks=pytest.mark.slow),
        ("memory", "took more than 5 s or 8 GiB"),
        ("center", "took more than 5 s or 8 GiB"),
    ],
)
def test_a_template_past_its_bounds_is_400_and_health_stays_quick(server, kind, says):
    before = server.canary()
    slowest = 0.0
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(chat, server, "a", kind)
        while not answer.done():
            began = time.monotonic()
            assert server.http.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.02)
    assert says in refused(answer.result(), 400, "messages")["message"]
    assert slowest < 0.5
    assert server.canary() == before


def test_a_long_text_that_a_filter_makes_is_answered(server):
    assert chat(server, "a", "wordwrap", max_tokens=1).status_code == 200


def test_what_is_only_uncounted_is_answered_all_the_same(server):
    found = chat(server, "a", "fine", path="/tokenize")
    assert found.status_code == 200
    text = server.http.post("/detokenize", json={"tokens": found.json()["tokens"]}).json()["prompt"]
    assert text.startswith("300<|im_start|>user: a<|im_end|>")
    assert chat(server, "a", "fine", max_tokens=2, seed=1).status_code == 200
    assert chat(server, "a", max_tokens=2, seed=1).status_code == 200


def test_an_object_is_not_printed(server):
    error = refused(chat(server, "a", "address"), 400, "messages")
    assert "prints an object (Joiner)" in error["message"] and "0x" not in error["message"]
