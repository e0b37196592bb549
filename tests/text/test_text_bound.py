"""A text's least number of tokens is never more than the number it has."""

import copy
import json
import unicodedata
from fractions import Fraction

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from tests.lib.text.made_tokenizers import sentencepiece_like
from tpdet.errors import RequestError
from tpdet.text.token_bound import NFC_SHRINKS, bytes_per_token
from tpdet.text.tokenizer import Tokenizer


def described(backend: tokenizers.Tokenizer) -> dict:
    return json.loads(backend.to_str())


def llama_like() -> tokenizers.Tokenizer:
    """SentencePiece with its blanks made by the normalizer, as Llama 2's file has it."""
    backend = sentencepiece_like()
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return backend


pieces = st.sampled_from(
    [
        " ",
        "  " * 40,
        "the ",
        "\n",
        "\r\n\t",
        "def f(self):\n        ",
        "\u212a",
        "\u212b\u0327",
        "\u0390",
        "ι\u0308\u0301",
        "\u1fbe\u0344",
        "\u1112\u1161\u11ab",
        "각",
        "\U0002f800",
        "日本",
        "🎉",
        "<|im_end|>",
        "</s>",
        "<think>",
        "\u2126",
        "\u1fef",
        "\u037e",
        "\x00",
        "1234",
    ]
)


@settings(max_examples=120, deadline=None)
@given(st.lists(pieces | st.text(max_size=3), max_size=8).map("".join), st.integers(1, 9))
def test_no_text_has_fewer_tokens(tokenizer_folder, text, times):
    text *= times
    backends = [tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))]
    for backend in [*backends, sentencepiece_like(), llama_like()]:
        most = bytes_per_token(described(backend))
        count = len(backend.encode(text, add_special_tokens=False).ids)
        assert most is not None and len(text.encode()) <= most * count


def test_nfc_makes_no_text_shorter_than_is_assumed():
    """Each character of a decomposition bears its share of the longest spelling of it."""
    whole = {}
    for code in range(0x110000):
        parts = unicodedata.normalize("NFD", chr(code))
        if parts != chr(code):  # a lone surrogate is itself
            whole[chr(code)] = parts
    size = lambda text: len(text.encode())
    worth: dict[str, Fraction] = {}
    for character, parts in whole.items():
        for part in parts:
            share = Fraction(size(character), size(parts))
            worth[part] = max(worth.get(part, Fraction(1)), share)
    shrunk = [
        sum(worth.get(part, 1) * size(part) for part in whole.get(character, character))
        / size(character)
        for character in {*whole, *worth}
        if unicodedata.is_normalized("NFC", character)
    ]
    assert 3 <= max(shrunk) <= NFC_SHRINKS


def changed(description: dict, **parts) -> dict:
    return copy.deepcopy(description) | parts


def test_what_may_drop_or_join_text_has_no_bound(tokenizer_folder):
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    known = described(backend)
    assert bytes_per_token(known) == 4 * max(
        *(len(token) for token in known["model"]["vocab"]),
        *(len(token["content"]) for token in known["added_tokens"]),
    )
    for part in ("lstrip", "rstrip"):
        wrong = changed(known)
        wrong["added_tokens"][0][part] = True
        assert bytes_per_token(wrong) is None
    for normalizer in ("NFKC", "Strip", "StripAccents", "Lowercase", "BertNormalizer"):
        assert bytes_per_token(changed(known, normalizer={"type": normalizer})) is None
    for old, new in (("ab", "a"), ("a", ""), ("a", "bbbb")):
        step = {"type": "Replace", "pattern": {"String": old}, "content": new}
        assert bytes_per_token(changed(known, normalizer=step)) is None
    step = {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
    assert bytes_per_token(changed(known, normalizer=step)) is None
    for split in ({"type": "Whitespace"}, {"type": "Split", "behavior": "Removed"}):
        sequence = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]}
        assert bytes_per_token(changed(known, pre_tokenizer=sequence)) is None
    less = changed(known)
    del less["model"]["vocab"]["a"]
    assert bytes_per_token(less) is None
    pieces_ = described(sentencepiece_like())
    pieces_["model"]["byte_fallback"] = False
    assert bytes_per_token(pieces_) is None
    assert bytes_per_token(changed(known, model={"type": "WordPiece", "vocab": {}})) is None


def test_what_a_dropping_tokenizer_does_is_why(tokenizer_folder):
    """Negative control: blanks that are removed are no tokens."""
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )
    assert len(backend.encode(" " * 10_000, add_special_tokens=False).ids) == 0


def test_a_text_that_cannot_fit_is_refused_before_it_is_split(tokenizer_folder):
    tokenizer = Tokenizer.load(tokenizer_folder)
    long = "word " * 4000
    count = len(tokenizer.encode(long))
    assert tokenizer.encode(long, most=count) == tokenizer.encode(long)
    tokenizer._backend = None  # nothing may be split any more
    for refused in (
        lambda: tokenizer.encode(long, most=10),
        lambda: tokenizer.apply_chat_template([{"role": "user", "content": long}], most=10),
    ):
        with pytest.raises(RequestError, match="tokens, over the model's context of 10:"):
            refused()
