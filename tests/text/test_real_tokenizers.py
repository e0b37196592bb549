"""Published tokenizers give transformers' ids and text, and those of plain BPE.

They come from published wheels; without a network these tests are skipped.
"""

import random

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.lib.tree import ROOT
from tests.text.real_tokenizers import MAKERS
from tpdet.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from tpdet.text.detokenizer import IncrementalDetokenizer
from tpdet.text.tokenizer import Tokenizer

CORPUS = {
    "prose": (ROOT / "README.md").read_text()[:6000],
    "code": (ROOT / "tpdet" / "config.py").read_text()[:6000],
    "cjk": "日本語のテキスト、中文字符，한국어 문장. 漢字かな交じり文 123４５６ 𠮷野家 ㍿ ﾊﾝｶｸ",
    "emoji": "👩‍👩‍👧‍👦 flag 🇩🇪🇯🇵 \U0001f9d1\U0001f3fd‍\U0001f680 ok 👍🏽 ❤️ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "control": "\x00\x01\t\v\f\r\n\x1b[0m\x7f\x85\u2028\ufeff\u200b\u200d\ufffd\U0010ffff",
    "accents": "e\u0301 \u00e9 \u1e9b\u0323 I'LL don't WE'Re ﬁn ǅ Ⅷ ½ ٣٤ नमस्ते ภาษาไทย שָׁלוֹם",
    "spaces": "a  b   c\n\n\n  d \t e    \n 1 2  34\n\n\n5",
    "blanks": " " * 300 + "x" + "\n" * 99 + "\t" * 65 + " \n" * 33 + "\u3000\u00a0" * 9 + "  ",
    "begins with a blank": " a",
    "nothing": "",
}  # fmt: skip
SPECIAL = "<s>[INST] a <|im_start|>user\n b<|im_end|>\n<|endoftext|></s> [/INST]<0x41>▁<unk>"
SLOW = ("mistral v3", "qwen", "tekken", "llama 3")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MAKERS],
)
def real(request, tmp_path_factory):
    """(the tokenizer and its oracle, as tpdet loads it, as transformers does)"""
    found = MAKERS[request.param](tmp_path_factory.mktemp("tokenizer"))
    if found is None:
        pytest.skip(f"the wheel with the tokenizer {request.param} cannot be fetched")
    text, config, template = read_gguf_tokenizer(found.path)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(text), chat_template=template, **config
    )
    return found, Tokenizer.load(found.path), theirs


def streamed(tokenizer, ids, skip=False):
    """The pieces of a text, those held back at the end among them."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", CORPUS)
def test_text_has_the_tokens_of_plain_bpe_and_of_transformers(real, name):
    oracle, ours, theirs = real
    ids = ours.encode(CORPUS[name], add_special_tokens=False)
    assert [ours.token(id_) for id_ in ids] == oracle.plain(CORPUS[name])
    for special in (False, True):
        expected = theirs.encode(CORPUS[name], add_special_tokens=special)
        assert ours.encode(CORPUS[name], add_special_tokens=special) == expected


@pytest.mark.parametrize("name", CORPUS)
def test_text_comes_back_whole_and_piece_by_piece(real, name):
    oracle, ours, theirs = real
    text = oracle.normalized(CORPUS[name])
    ids = ours.encode(CORPUS[name], add_special_tokens=False)
    assert ours.decode(ids, False) == theirs.decode(ids) == text
    pieces = streamed(ours, ids)
    assert "".join(pieces) == text and pieces[-1] == ""
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_special_text_of_a_prompt_becomes_what_transformers_makes_of_it(real):
    _, ours, theirs = real
    for text in (SPECIAL, SPECIAL * 2, " " + SPECIAL):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (False, True):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert "".join(streamed(ours, ids, skip)) == ours.decode(ids, skip) == expected


def test_any_characters_and_any_ids_are_read_as_transformers_does(real):
    """Random characters of all planes; random ids, which are mostly ill-formed UTF-8, and cuts."""
    _, ours, theirs = real
    draw = random.Random(3)
    whole = ours.encode("".join(CORPUS.values()), add_special_tokens=False)
    lists = []
    for _ in range(60):
        plane = draw.choice([0x100, 0x800, 0x3000, 0xD800, 0x20000, 0x110000])
        codes = [draw.randrange(plane) for _ in range(draw.randint(1, 40))]
        text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        begin = draw.randrange(len(whole))
        lists += [ids, [draw.randrange(ours.vocab_size) for _ in codes], whole[begin : begin + 30]]
        lists.append([id_ for id_ in whole[begin : begin + 30] if draw.random() < 0.7])
    found = 0
    for ids in lists:
        for skip in (False, True):
            text = ours.decode(ids, skip)
            assert "".join(streamed(ours, ids, skip)) == text
            expected = theirs.decode(ids, skip_special_tokens=skip)
            if "\ufffd" in expected and not is_byte_level(theirs):
                continue  # transformers replaces a whole run of byte tokens
            assert text == expected
            found += "\ufffd" in text
    assert found or not is_byte_level(theirs)


def is_byte_level(theirs):
    return type(theirs.backend_tokenizer.decoder).__name__ == "ByteLevel"
