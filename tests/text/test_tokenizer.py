"""Tokenizers: transformers' ids, special tokens, and the files that are refused."""

import json

import pytest
import tokenizers

from tests.lib.text.made_tokenizers import CONTROL, TEXTS, sentencepiece_like
from tpdet.errors import CheckpointError, NotFoundError, RequestError
from tpdet.text.tokenizer import Tokenizer


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_are_those_of_transformers(our_tokenizer, their_tokenizer, text, add_special_tokens):
    ids = our_tokenizer.encode(text, add_special_tokens)
    assert ids == their_tokenizer.encode(text, add_special_tokens=add_special_tokens)
    assert our_tokenizer.decode(ids, skip_special_tokens=False) == their_tokenizer.decode(ids)
    assert our_tokenizer.decode(ids) == their_tokenizer.decode(ids, skip_special_tokens=True)


def encode_plain(tokenizer, text, add_special_tokens=False):
    """Ids of a text that a template writes as a message's content, and nothing else."""
    bare = tokenizer.with_chat_template("{{ messages[0].content }}")
    messages = [{"role": "user", "content": text}]
    return bare.apply_chat_template(messages, add_special_tokens=add_special_tokens)


def test_special_token_text_is_special_in_prompts_and_text_in_plain_text(our_tokenizer):
    special = {our_tokenizer.encode(token, False)[0] for token in CONTROL}
    assert special & {*our_tokenizer.encode("x<|im_end|>", False)}
    assert not special & {*encode_plain(our_tokenizer, "x<|im_end|><|endoftext|>")}
    assert our_tokenizer.decode(encode_plain(our_tokenizer, "x<|im_end|>")) == "x<|im_end|>"
    assert encode_plain(our_tokenizer, "Hello") == our_tokenizer.encode("Hello", False)
    assert encode_plain(our_tokenizer, "Hello", True) == our_tokenizer.encode("Hello", True)


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
    tokenizer = Tokenizer(
        backend,
        {"bos_token": "<s>", "eos_token": "</s>"},
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a<think>"}])
    assert ids == tokenizer.encode("<s>a<think></s>")
    assert tokenizer.eos_token_ids == (backend.token_to_id("</s>"),)


@pytest.mark.parametrize("encode", [Tokenizer.encode, encode_plain])
def test_a_lone_surrogate_is_refused(our_tokenizer, encode):
    with pytest.raises(RequestError, match=r"U\+DC80.*character 1"):
        encode(our_tokenizer, "a\udc80")


def test_the_information_names_no_path(our_tokenizer, tokenizer_folder):
    info = our_tokenizer.info()
    assert (info["bos_token"], info["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert info["add_bos_token"] is True and info["vocab_size"] == 1500
    assert str(tokenizer_folder) not in json.dumps(info)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "</none>"}, "eos_token '</none>' is not in"),
        ({"pad_token": "\ud800"}, "lone surrogate"),
        (
            {"added_tokens_decoder": {"3": {"content": "<|im_end|>"}}},
            "has id 3, by tokenizer.json it is 1499",
        ),
        ({"chat_template": 3}, "chat_template is a int"),
        ("[]", "not an object"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{"a": 1e999}', "not finite"),
    ],
)
def test_files_that_contradict_each_other_are_refused(tokenizer_folder, tmp_path, config, message):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
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
    tokenizer_folder, tmp_path, place, value, message
):
    """The second ends the process inside the library, the others fail at the first request."""
    description = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    inner = description
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_of_the_file_are_not_applied(tokenizer_folder, tmp_path):
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "a longer text than that, by far"
    assert Tokenizer.load(tmp_path).encode(text) == Tokenizer.load(tokenizer_folder).encode(text)
