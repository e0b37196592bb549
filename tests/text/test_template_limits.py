"""One limit on chat templates, whatever their file, so that each is compiled in seconds."""

import json
import shutil
import time

import pytest

from tests.checkpoint.gguf.gguf_models import write_gguf
from tpdet.errors import CheckpointError
from tpdet.text.chat_template import ChatTemplate
from tpdet.text.template_language import MOST_BYTES, MOST_TOKENS
from tpdet.text.tokenizer import Tokenizer

SECONDS = 10.0  # of a busy machine; about 2 on an idle one
LONG = "a" * (MOST_BYTES + 1)
MANY = "{{ a }}" * (MOST_TOKENS // 5 + 1)
LIMITS = {LONG: f"over the limit of {MOST_BYTES} bytes", MANY: f"over {MOST_TOKENS} names"}


def in_config(folder, template):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, None


def in_named_list(folder, template):
    return in_config(folder, [{"name": "default", "template": template}])


def in_jinja_file(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    return folder, None


def in_chosen_file(folder, template):
    (folder / "mine.jinja").write_text(template)
    return folder, folder / "mine.jinja"


PLACES = (in_config, in_named_list, in_jinja_file, in_chosen_file)


@pytest.fixture
def folder(tokenizer_folder, tmp_path):
    return shutil.copytree(tokenizer_folder, tmp_path / "model")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("template", [LONG, MANY], ids=["long", "many"])
def test_every_file_has_the_limit(place, template, folder):
    model, chosen = place(folder, template)
    began = time.process_time()
    with pytest.raises(CheckpointError, match=LIMITS[template]):
        Tokenizer.load(model, chosen)
    assert time.process_time() - began < SECONDS
    model, chosen = place(folder, "{{ messages[0].content }}")
    assert Tokenizer.load(model, chosen).chat_template is not None


@pytest.mark.parametrize("template", [LONG, MANY], ids=["long", "many"])
def test_a_gguf_file_has_the_limit(template, tiny_model, tmp_path):
    def change(writer):
        writer.kv_data[0].pop("tokenizer.chat_template")
        writer.add_chat_template(template)

    path = write_gguf(tiny_model(), tmp_path / "model.gguf", change=change)
    with pytest.raises(CheckpointError, match=LIMITS[template]):
        Tokenizer.load(path)


@pytest.mark.parametrize("name", [[], ["default"], {}, {"a": 1}, 1, None, 1e308])
def test_a_name_of_a_template_that_is_no_text_is_passed_over(name, folder):
    other = {"name": name, "template": "other"}
    in_config(
        folder, [other, {"name": "default", "template": "1 {{ messages[0].content }}"}, other]
    )
    assert Tokenizer.load(folder).render_chat([{"role": "user", "content": "x"}]) == "1 x"
    in_config(folder, [other])
    assert Tokenizer.load(folder).chat_template is None


UNITS = {
    "calls": "{{ a.b(c) }}", "prints": "{{ a }}", "conditions": "{{ a if b else c }}",
    "loops": "{% for a in b %}{% endfor %}", "macros": "{% macro f(a, b=1) %}{{ a }}{% endmacro %}",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", UNITS)
def test_the_largest_templates_are_compiled_in_seconds(name):
    most = "".join(UNITS[name] for _ in range(MOST_TOKENS // 12))
    began = time.process_time()
    ChatTemplate(most, {}, [])
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    "template", ["{{ a | nosuch }}", "{% nosuch %}", "{{ 'a\n\nb", "{{ a b }}"]
)
def test_the_refusal_of_a_template_is_one_short_line(template):
    with pytest.raises(CheckpointError) as refused:
        ChatTemplate(template, {}, [])
    assert "\n" not in str(refused.value) and len(str(refused.value)) <= 500
