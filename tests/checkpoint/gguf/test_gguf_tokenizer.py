"""The tokenizer of a GGUF file: what its fields ask for, and limits on what they may cost."""

import json
import random
import time

import pytest

from tests.checkpoint.gguf.gguf_bytes import model
from tests.checkpoint.gguf.gguf_models import write_gguf
from tests.checkpoint.gguf.test_gguf_fields import BYTE_MERGES, BYTES, PIECE_SCORES, PIECES, tokens
from tpdet import LLM, SamplingParams
from tpdet.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from tpdet.errors import CheckpointError
from tpdet.text.tokenizer import Tokenizer

SECONDS = 10.0  # of a busy machine


def written(folder, fields):
    path = folder / "model.gguf"
    path.write_bytes(model(fields))
    return path


def of_bytes(folder, **more):
    return written(folder, tokens("gpt2", BYTES, **(BYTE_MERGES | more)))


def of_pieces(folder, listed=PIECES, **more):
    scores = {"scores": ("list of f32", [0.0] * len(listed))}
    return written(folder, tokens("llama", listed, **(PIECE_SCORES | scores | more)))


@pytest.mark.parametrize("pre", [None, ("text", "kimi-k2"), ("text", "default")])
def test_an_unknown_way_to_split_a_text_names_the_flag_that_helps(pre, tmp_path):
    fields = tokens("gpt2", BYTES, **BYTE_MERGES)
    del fields["tokenizer.ggml.pre"]
    path = written(tmp_path, fields | ({"tokenizer.ggml.pre": pre} if pre else {}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is .*: give --tokenizer DIR"):
        Tokenizer.load(path)


@pytest.mark.parametrize("field", ["model", "tokens", "token_type", "merges"])
def test_a_tokenizer_that_is_not_there_names_the_flag_that_helps(field, tmp_path):
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{field} is .*--tokenizer DIR"):
        Tokenizer.load(of_bytes(tmp_path, **{field: ("text", "other")}))


def test_the_flag_helps(tiny_model, tmp_path):
    made = tiny_model("llama")
    path = write_gguf(made, tmp_path / "m.gguf", change=lambda w: w.add_tokenizer_pre("kimi-k2"))
    settings = {"device": "cpu", "kv_pages": 4, "dtype": "float32"}
    params = SamplingParams(max_tokens=2, temperature=0)
    with LLM(str(path), tokenizer=str(made), **settings) as llm:
        found = llm.generate(["a b"], params, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(str(made), **settings) as llm:
        assert found == llm.generate(["a b"], params, use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(CheckpointError, match=r"'kimi-k2': only gpt-2.*--tokenizer DIR"):
        LLM(str(path), **settings)


@pytest.mark.parametrize(
    ("name", "same"), [("deepseek-r1-qwen", "qwen2"), ("llama-v3", "llama-bpe")]
)
def test_names_of_one_rule_split_alike(name, same, tmp_path):
    """As llama.cpp has them: the same expression, and the same default for the first token."""
    files = [read_gguf_tokenizer(of_bytes(tmp_path, pre=("text", each))) for each in (name, same)]
    assert files[0] == files[1]
    other = read_gguf_tokenizer(of_bytes(tmp_path, pre=("text", "gpt-2")))
    assert files[0][0] != other[0]


@pytest.mark.parametrize("make", [of_bytes, of_pieces])
def test_the_first_and_the_last_token_are_added_as_the_fields_say(make, tmp_path):
    for begin in (True, False):
        for end in (True, False):
            more = {"add_bos_token": ("bool", begin), "add_eos_token": ("bool", end)}
            tokenizer = Tokenizer.load(make(tmp_path, **more))
            assert tokenizer.around == ([1] * begin, [2] * end)
            ids, bare = tokenizer.encode("ab"), tokenizer.encode("ab", add_special_tokens=False)
            assert ids == [1] * begin + bare + [2] * end
    silent = tokens("gpt2", BYTES, **BYTE_MERGES)
    del silent["tokenizer.ggml.add_bos_token"], silent["tokenizer.ggml.add_eos_token"]
    assert Tokenizer.load(written(tmp_path, silent)).around == ([], [])
    with pytest.raises(CheckpointError, match=r"add_sep_token is True.*--tokenizer DIR"):
        Tokenizer.load(make(tmp_path, add_sep_token=("bool", True)))


LONG = {
    "one": ([*PIECES, "a" * (1 << 20)], "a token has 1048576 characters, 1024 is the limit"),
    "many": ([*PIECES, *(f"{i:0>1000}" for i in range(9000))], "characters, 8388608 is the limit"),
    "nested": (
        [*PIECES, *("a" * i for i in range(3, 1000)),
         *(chr(0x4E00 + i) + "a" * k for i in range(8) for k in range(1000))],
        "make over 2097152 merges",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["one", "many", pytest.param("nested", marks=pytest.mark.slow)])
def test_long_tokens_are_refused_in_seconds(name, tmp_path):
    listed, message = LONG[name]
    path = of_pieces(tmp_path, listed)
    began = time.process_time()
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.tokens is .*{message}"):
        Tokenizer.load(path)
    assert time.process_time() - began < SECONDS


def test_merges_are_all_pairs_of_tokens_that_make_a_token(tmp_path):
    draw = random.Random(7)
    made = ("".join(draw.choices("ab▁\U0001f600", k=draw.randint(1, 6))) for _ in range(400))
    listed = list(dict.fromkeys(made))
    listed = [*PIECES, *(token for token in listed if token not in PIECES)]
    scores = [float(draw.randint(-9, 9)) for _ in listed]
    path = of_pieces(tmp_path, listed, scores=("list of f32", scores))
    ids = {token: index for index, token in enumerate(listed)}
    expected = sorted(
        (-scores[ids[token]], ids[token], ids[token[:cut]], ids[token[cut:]])
        for token in listed
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    )
    found = json.loads(read_gguf_tokenizer(path)[0])["model"]["merges"]
    assert len(found) > 100
    assert found == [[listed[left], listed[right]] for _, _, left, right in expected]


MERGES = ("a b", "ab", "ab c", "a  b", " b", "a ", "a b c", "", "x" * 5000)


@pytest.mark.parametrize("merge", MERGES[1:])
def test_a_merge_that_makes_no_token_is_refused(merge, tmp_path):
    with pytest.raises(CheckpointError, match=r"ggml\.merges is .*no two tokens.*--tokenizer DIR"):
        Tokenizer.load(of_bytes(tmp_path, merges=("list of text", ["a b", merge])))
    assert Tokenizer.load(of_bytes(tmp_path, merges=("list of text", MERGES[:1])))


def test_scores_that_are_no_numbers_are_refused(tmp_path):
    scores = [0.0] * (len(PIECES) - 1) + [float("nan")]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores is .*NaN or infinite"):
        Tokenizer.load(of_pieces(tmp_path, scores=("list of f32", scores)))
