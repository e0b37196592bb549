"""Streamed text is the one-shot text, for any ids at all, and for real text that of tokenizers."""

import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from tests.lib.text.made_tokenizers import sentencepiece_like
from tpdet.errors import CheckpointError
from tpdet.text.detokenizer import IncrementalDetokenizer
from tpdet.text.token_bytes import DecoderRules
from tpdet.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(our_tokenizer, tokenizer_folder):
    return our_tokenizer, tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_fallback():
    backend = sentencepiece_like()
    return Tokenizer(backend, {}, None), backend


def streamed(tokenizer, ids, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    pieces = [detokenizer.push(token) for token in ids]
    return "".join(pieces) + detokenizer.finish()


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 1600), max_size=40), skip=st.booleans())
def test_any_ids_stream_to_the_one_shot_text(byte_level, ids, skip):
    """Random ids are mostly ill-formed UTF-8; ids past the vocabulary have no text."""
    ours, theirs = byte_level
    text = ours.decode(ids, skip)
    assert streamed(ours, ids, skip) == text
    assert text == theirs.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 290), max_size=40), skip=st.booleans())
def test_byte_tokens_stream_to_the_one_shot_text(byte_fallback, ids, skip):
    ours, theirs = byte_fallback
    text = ours.decode(ids, skip)
    assert streamed(ours, ids, skip) == text
    expected = theirs.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in expected:
        assert text == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_text_comes_back(byte_level, byte_fallback, text):
    for ours, theirs in (byte_level, byte_fallback):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert streamed(ours, ids) == theirs.decode(ids)


def test_a_character_is_held_back_until_its_last_byte(byte_fallback):
    ours, backend = byte_fallback
    detokenizer = IncrementalDetokenizer(ours, True)
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "🎉é".encode()]
    assert [detokenizer.push(token) for token in ids] == ["", "", "", "🎉", "", "é"]
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_one_replacement_at_the_end(byte_fallback):
    ours, backend = byte_fallback
    detokenizer = IncrementalDetokenizer(ours, True)
    assert detokenizer.push(backend.token_to_id("<0xF0>")) == ""
    assert detokenizer.push(backend.token_to_id("<0x9F>")) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_complete_character_stays_when_the_next_is_ill_formed(byte_fallback):
    """Where tokenizers replaces the whole run, a stream has already shown it."""
    ours, backend = byte_fallback
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in (0xC3, 0xA9, 0xC3)]
    assert streamed(ours, ids) == ours.decode(ids) == "é\ufffd"
    assert backend.decode(ids) == "\ufffd" * 3


def test_special_tokens_are_skipped_or_shown(byte_level):
    ours, _ = byte_level
    ids = ours.encode("a<|im_end|>b", add_special_tokens=False)
    assert streamed(ours, ids, skip=True) == "ab"
    assert streamed(ours, ids, skip=False) == "a<|im_end|>b"


def test_the_space_before_a_text_is_dropped_once(byte_fallback):
    ours, backend = byte_fallback
    ids = [backend.token_to_id(token) for token in ("<s>", "▁", "▁a", "▁t")]
    assert streamed(ours, ids) == " a t"
    assert streamed(ours, ids, skip=False) == "<s>  a t"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoders_are_followed(scheme):
    vocab = {token: i for i, token in enumerate(["▁", "a", "▁a", "▁▁a", "é"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    ours = Tokenizer(backend, {}, None)
    for ids in ([2, 2], [3, 1, 3], [0, 2], [4, 2], []):
        assert streamed(ours, ids) == ours.decode(ids) == backend.decode(ids)


def test_a_token_costs_the_same_however_long_the_text_is(byte_level):
    """A run of ill-formed bytes never ends a character; a decoded window would grow with it."""
    ours, _ = byte_level
    token = next(i for i in range(300) if ours.token(i) == "Ģ")  # byte 0x80
    detokenizer = IncrementalDetokenizer(ours, True)
    begin = time.perf_counter()
    for _ in range(50_000):
        detokenizer.push(token)
    assert time.perf_counter() - begin < 5.0


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "decoder None"),
        ({"type": "WordPiece", "prefix": "##"}, "WordPiece"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, "Fuse"),
        (
            {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"Regex": "_"}, "content": " "},
                {"type": "Fuse"}]},
            "Replace with",
        ),
        (
            {"type": "Sequence", "decoders": [
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
            "stop must be 0",
        ),
    ],
)  # fmt: skip
def test_decoders_that_are_not_known_are_refused_by_name(decoder, message):
    with pytest.raises(CheckpointError, match=message):
        DecoderRules(decoder)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 290), max_size=40))
def test_texts_that_are_kept_change_no_text(byte_fallback, ids):
    """Tokens inside a character, and the first of a text, depend on others: they are not kept."""
    ours, _ = byte_fallback
    once = streamed(ours, ids, True)
    assert streamed(ours, ids, True) == once == ours.decode(ids, True)
