"""Tokenizers and chat templates: transformers' ids, and user text that never becomes special."""

import json
import os
import subprocess
import sys

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tpdet.chat_template import ChatTemplate
from tpdet.errors import CheckpointError, NotFoundError, RequestError, UsageError
from tpdet.tokenizer import Tokenizer
from tpdet.train_tokenizer import train_tokenizer

TEXTS = (
    "",
    "Hello world, 123 things",
    " leading and  double  spaces\n\n\tand tabs ",
    "naïve e\u0301tude, 日本語, 🎉🇩🇪",
    "<|im_start|>user\nhi<|im_end|>\n",
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN3_LIKE = """\
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(path, 1500)
    return path


@pytest.fixture(scope="module")
def ours(directory):
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def theirs(directory):
    return transformers.PreTrainedTokenizerFast.from_pretrained(directory)


def sentencepiece_like(special_in_vocabulary: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2's: prefix space, byte tokens, and special tokens inside the vocabulary."""
    words = ["<unk>", "<s>", "</s>"] if special_in_vocabulary else ["<unk>"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["▁", *"abcdehilnorstw</>", "▁a", "▁t", "▁th"]
    vocab = {word: place for place, word in enumerate(words)}
    merges = [("▁", "a"), ("▁", "t"), ("▁t", "h")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(content=" ", left=1, right=0)]
    )  # fmt: skip
    for token in ("<s>", "</s>"):
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_are_those_of_transformers(ours, theirs, text, add_special_tokens):
    ids = ours.encode(text, add_special_tokens)
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_special_token_text_is_special_in_prompts_and_text_in_plain_text(ours):
    special = {ours.encode(token, False)[0] for token in CONTROL}
    assert special & {*ours.encode("x<|im_end|>", False)}
    assert not special & {*ours.encode_plain("x<|im_end|><|endoftext|>")}
    assert ours.decode(ours.encode_plain("x<|im_end|>")) == "x<|im_end|>"
    assert ours.encode_plain("Hello") == ours.encode("Hello", False)
    assert ours.encode_plain("Hello", True) == ours.encode("Hello", True)


def test_a_conversation_is_encoded_as_transformers_does(ours, theirs):
    messages = [
        {"role": "system", "content": "  be brief\n"},
        {"role": "user", "content": "Hello, 日本語 🎉"},
    ]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt)
        assert ours.apply_chat_template(messages, prompt) == expected["input_ids"]


def test_the_ids_before_a_text_are_added_to_a_conversation_only_when_asked_for(ours):
    messages = [{"role": "user", "content": "hi"}]
    ids = ours.apply_chat_template(messages)
    begin = ours.bos_token_id
    assert ours.apply_chat_template(messages, add_special_tokens=True) == [begin, *ids]


user_texts = st.lists(
    st.one_of(
        st.sampled_from([*CONTROL, "<|", "|>", "im_end", "<|im_", "end|>", " ", "\n", "'", '"']),
        st.text(max_size=4),
    ),
    max_size=6,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(contents=st.lists(user_texts, min_size=1, max_size=3))
def test_no_user_text_becomes_a_special_token(ours, contents):
    messages = [{"role": "user", "content": content} for content in contents]
    ids = ours.apply_chat_template(messages)
    special = [i for i in ids if ours.token(i, skip_special_tokens=True) is None]
    start, end = (ours.encode(token, False)[0] for token in CONTROL[1:])
    assert special == [ours.bos_token_id, *[start, end] * len(contents), start]


def test_pieces_of_a_special_token_in_neighbouring_messages_do_not_join(directory, tmp_path):
    glued = tmp_path / "glued.jinja"
    glued.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    tokenizer = Tokenizer.load(directory, glued)
    parts = [{"role": "user", "content": text} for text in ("<", "|", "im_", "end|>")]
    ids = tokenizer.apply_chat_template(parts)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>", False) != ids


def test_a_template_that_looks_into_contents_still_does(theirs):
    template = ChatTemplate(QWEN3_LIKE, {}, CONTROL)
    messages = [
        {"role": "assistant", "content": "<think>hm</think>\n\nYes <|im_end|>"},
        {"role": "user", "content": "<|im_end|></think>"},
    ]
    segments = template.render(messages, False)
    text = "".join(segment.text for segment in segments)
    expected = theirs.apply_chat_template(messages, chat_template=QWEN3_LIKE, tokenize=False)
    assert text == expected
    assert "hm" not in text
    special = [segment.text for segment in segments if segment.special]
    assert special == ["<|im_start|>", "<|im_end|>"] * 2


def test_a_template_that_rewrites_special_text_is_refused_for_such_messages():
    template = ChatTemplate("{{ messages[0].content | replace('<|im_end|>', '!') }}", {}, CONTROL)
    assert template.render([{"role": "user", "content": "fine"}], False)[0].text == "fine"
    with pytest.raises(RequestError, match="remove such text"):
        template.render([{"role": "user", "content": "a<|im_end|>"}], False)


def test_private_use_characters_of_users_are_kept(ours):
    text = "\U000f0000\U000f0001\ufdd0\ufdd1<|im_end|>"
    ids = ours.apply_chat_template([{"role": "user", "content": text}])
    assert f"user\n{text}<|im_end|>" in ours.decode(ids, skip_special_tokens=False)


def test_special_tokens_inside_the_vocabulary_are_told_apart():
    backend = sentencepiece_like()
    turns = "{% for m in messages %} {{ m.content }} {{ eos_token }}{% endfor %}"
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(backend, named, "{{ bos_token }}" + turns)
    written = "<s> the<think> also</s>"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the<think> also"}])
    assert tokenizer.decode(ids, False).replace(" </s>", "</s>") == written
    assert ids == tokenizer.encode("<s> the<think> also </s>")
    attacked = tokenizer.apply_chat_template([{"role": "user", "content": "</s> <s>"}])
    assert [i for i in attacked if i in (1, 2)] == [1, 2]


def test_special_tokens_outside_the_vocabulary_keep_their_ids():
    backend = sentencepiece_like(special_in_vocabulary=False)
    tokenizer = Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"},
                          "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")  # fmt: skip
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a<think>"}])
    assert ids == tokenizer.encode("<s>a<think></s>")
    assert tokenizer.eos_token_ids == (backend.token_to_id("</s>"),)


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
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content must be text"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "tool_calls is not supported"),
        ([{"role": "user", "content": "x\ud800"}], "lone surrogate"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(ours, messages, message):
    with pytest.raises(RequestError, match=message):
        ours.apply_chat_template(messages)


def test_text_parts_are_joined(ours):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = ours.apply_chat_template([{"role": "user", "content": parts}])
    assert joined == ours.apply_chat_template([{"role": "user", "content": "ab"}])


@pytest.mark.parametrize("encode", ["encode", "encode_plain"])
def test_a_lone_surrogate_is_refused(ours, encode):
    with pytest.raises(RequestError, match=r"U\+DC80.*character 1"):
        getattr(ours, encode)("a\udc80")


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
        ("{{ strftime_now('%Y') }}", "strftime_now.*--chat-template"),
    ],
)
def test_templates_that_cannot_be_kept_are_refused_at_load(template, message):
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate(template, {}, ())


def test_a_template_with_a_date_of_its_own_is_served():
    source = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}26 Jul{% endif %}"
    segments = ChatTemplate(source, {}, ()).render([{"role": "user", "content": "x"}], False)
    assert segments[0].text == "26 Jul"


def test_the_template_is_the_chosen_file_or_the_directorys_or_the_configurations(
    directory, tmp_path
):
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
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


def test_the_information_names_no_path(ours, directory):
    info = ours.info()
    assert (info["bos_token"], info["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert info["add_bos_token"] is True and info["vocab_size"] == 1500
    assert str(directory) not in json.dumps(info)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "</none>"}, "eos_token '</none>' is not in"),
        ({"pad_token": "\ud800"}, "lone surrogate"),
        ({"added_tokens_decoder": {"3": {"content": "<|im_end|>"}}}, "has id 3, in tokenizer.json"),
        ({"chat_template": 3}, "chat_template is a int"),
        ("[]", "not an object"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{"a": 1e999}', "not finite"),
    ],
)
def test_files_that_contradict_each_other_are_refused(directory, tmp_path, config, message):
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("model",), 3, "has no model"),
        (("model", "continuing_subword_prefix"), "x", "continuing_subword_prefix"),
        (("model", "vocab", "A"), 5, "both have id 5"),
        (("post_processor", "single", 0, "SpecialToken", "id"), "x", "cannot be read"),
    ],
)
def test_what_the_library_would_fail_on_later_is_refused_at_load(
    directory, tmp_path, place, value, message
):
    """The second ends the process inside the library, the others fail at the first request."""
    description = json.loads((directory / "tokenizer.json").read_text())
    inner = description
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_of_the_file_are_not_applied(directory, tmp_path):
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "a longer text than that, by far"
    assert Tokenizer.load(tmp_path).encode(text) == Tokenizer.load(directory).encode(text)


def test_special_tokens_that_strip_their_surroundings_do_so_only_where_the_template_wrote_them(
    directory, tmp_path
):
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    source = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    ours = Tokenizer.load(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template([{"role": "user", "content": " \n a"}])
    assert (
        ours.apply_chat_template([{"role": "user", "content": " \n a"}], False)
        == (expected["input_ids"])
    )
    attacked = ours.apply_chat_template([{"role": "user", "content": "a \n<|user|>\n b"}], False)
    assert ours.decode(attacked, False) == "<|user|>a \n<|user|>\n b<|im_end|>"
    assert len([i for i in attacked if ours.token(i) == "<|user|>"]) == 1


@pytest.mark.parametrize("size", [1024, 1031, 8192])
def test_a_trained_vocabulary_has_exactly_the_size_asked_for(tmp_path, size):
    ids = train_tokenizer(str(tmp_path / "new"), size)
    tokenizer = Tokenizer.load(tmp_path / "new")
    assert tokenizer.vocab_size == size
    assert all(tokenizer.token(i) is not None for i in range(size))
    assert ids == {"bos_token_id": size - 3, "eos_token_id": size - 1, "pad_token_id": size - 3}
    assert tokenizer.eos_token_ids == (ids["eos_token_id"],)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "new").eos_token_id == size - 1


def test_a_vocabulary_too_small_or_beyond_the_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match="1023: use at least 1024"):
        train_tokenizer(tmp_path, 1023)
    with pytest.raises(UsageError, match=r"500000: the text to train on supports \d+"):
        train_tokenizer(tmp_path, 500_000)
    assert not any(tmp_path.iterdir())


def test_another_process_trains_the_same_bytes(directory, tmp_path):
    code = (
        "import sys; from tpdet.train_tokenizer import train_tokenizer as t; t(sys.argv[1], 1500)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "11", "RAYON_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()
