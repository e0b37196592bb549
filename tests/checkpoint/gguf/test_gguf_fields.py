"""Each field of a GGUF file at values of every type: it loads, or is refused by name at once."""

import resource
import time

import numpy as np
import pytest

from tests.checkpoint.gguf.gguf_bytes import model
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.gguf.config import read_gguf_config
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.sample import sample_checkpoint
from tpdet.errors import TpdetError
from tpdet.text.token_bytes import byte_of_character
from tpdet.text.tokenizer import Tokenizer

SECONDS, KIB = 2.0, 128 << 10  # of one file; of all
WORDS = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
PIECES = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
BYTES = [*WORDS, *(c for c in byte_of_character() if c not in "ab")]
HIDDEN, HEAD = 128, 64


def sizes(name):
    return {
        "general.architecture": ("text", name),
        "general.file_type": ("u32", 0),
        "general.alignment": ("u32", 32),
        "split.count": ("u32", 1),
        f"{name}.block_count": ("u32", 1),
        f"{name}.context_length": ("u32", 64),
        f"{name}.embedding_length": ("u32", HIDDEN),
        f"{name}.feed_forward_length": ("u32", 128),
        f"{name}.attention.head_count": ("u32", 2),
        f"{name}.attention.head_count_kv": ("u32", 2),
        f"{name}.attention.key_length": ("u32", HEAD),
        f"{name}.attention.value_length": ("u32", HEAD),
        f"{name}.attention.sliding_window": ("u32", 0),
        f"{name}.attention.layer_norm_rms_epsilon": ("f32", 1e-6),
        f"{name}.vocab_size": ("u32", 262),
        f"{name}.expert_count": ("u32", 0),
        f"{name}.expert_used_count": ("u32", 0),
        f"{name}.rope.dimension_count": ("u32", HEAD),
        f"{name}.rope.freq_base": ("f32", 10000.0),
        f"{name}.rope.scaling.type": ("text", "none"),
        f"{name}.rope.scaling.factor": ("f32", 1.0),
        f"{name}.rope.scaling.original_context_length": ("u32", 64),
        f"{name}.rope.scaling.finetuned": ("bool", False),
    }


def tokens(kind, listed, **more):
    return {
        "tokenizer.ggml.model": ("text", kind),
        "tokenizer.ggml.tokens": ("list of text", listed),
        "tokenizer.ggml.token_type": ("list of i32", [2, 3, 3] + [1] * (len(listed) - 3)),
        "tokenizer.ggml.unknown_token_id": ("u32", 0),
        "tokenizer.ggml.bos_token_id": ("u32", 1),
        "tokenizer.ggml.eos_token_id": ("u32", 2),
        "tokenizer.ggml.eot_token_id": ("u32", 2),
        "tokenizer.ggml.padding_token_id": ("u32", 2),
        "tokenizer.ggml.add_bos_token": ("bool", True),
        "tokenizer.ggml.add_eos_token": ("bool", False),
        "tokenizer.ggml.add_sep_token": ("bool", False),
        "tokenizer.chat_template": ("text", "{{ messages[0].content }}"),
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


PIECE_SCORES = {"scores": ("list of f32", [0.0] * len(PIECES)), "add_space_prefix": ("bool", True)}
BYTE_MERGES = {"pre": ("text", "qwen2"), "merges": ("list of text", ["a b"])}
TENSORS = {"token_embd.weight": np.zeros((262, HIDDEN)), "output_norm.weight": np.zeros(HIDDEN)}
FACTORS = {"rope_freqs.weight": np.ones(HEAD // 2)}
FILES = {
    "llama": (sizes("llama") | tokens("llama", PIECES, **PIECE_SCORES), TENSORS),
    "llama scaled": (sizes("llama") | tokens("llama", PIECES, **PIECE_SCORES), TENSORS | FACTORS),
    "qwen2": (sizes("qwen2") | tokens("gpt2", BYTES, **BYTE_MERGES), TENSORS),
}
VALUES = [
    ("u32", 0), ("u32", 1), ("u32", 2**31), ("i32", -1), ("u64", 2**62), ("u64", 2**64 - 1),
    ("f32", float("nan")), ("f32", float("-inf")), ("f64", 1e308), ("f64", 5e-324), ("bool", True),
    ("text", ""), ("text", "none"), ("text", "64"), ("text", "\r\n" * 5000),
    ("list of u32", []), ("list of u32", [2, 3]), ("list of text", ["llama"]),
    ("list of f32", [float("nan")] * 262), ("list of i32", [-1] * 262),
    ("list of text", ["x" * 5000] * 262),
]  # fmt: skip
# Fields that no value harms: they are not read, or every value of their type means something.
FREE = ("rope.scaling.finetuned", "rope.scaling.factor", "original_context_length")


def load_all(path):
    """Everything that a start reads of a file."""
    load_model_config(path)
    tokenizer = Tokenizer.load(path)
    tokenizer.encode("ab <s> c")
    tokenizer.prepare_chats()
    checkpoint = open_checkpoint(path)
    return checkpoint.names, checkpoint.rules, sample_checkpoint(path, ())


def check(path, name, key, value):
    """Load the file `name` with another value; returns the refusal, or None."""
    fields, tensors = FILES[name]
    path.write_bytes(model(fields | {key: value}, tensors))
    began = time.process_time()
    try:
        load_all(path)
        message = None
    except TpdetError as error:
        message = str(error)
        assert error.exit_code in (65, 71) and len(message) <= 500 and "\n" not in message, message
        assert any(part in message for part in (key, "heads of", "tensor", "token")), message
    assert time.process_time() - began < SECONDS, (key, value)
    return message


def sweep(tmp_path, step):
    before, number = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for name, (fields, _) in FILES.items():
        for key in fields:
            refused = []
            for value in VALUES:
                number += 1
                if number % step == 0:
                    refused.append(check(tmp_path / "model.gguf", name, key, value) is not None)
            if step == 1 and not key.endswith(FREE):
                assert any(refused), f"{name}: {key} takes all"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < KIB


@pytest.mark.parametrize("name", FILES)
def test_the_sound_files_load(name, tmp_path):
    fields, tensors = FILES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(model(fields, tensors))
    names, _, _ = load_all(path)
    assert names == ("model.embed_tokens.weight", "model.norm.weight")
    assert load_model_config(path).head_dim == HEAD
    assert read_gguf_config(path).names["head_dim"].endswith(".attention.key_length")


def test_each_field_at_some_values_loads_or_is_refused_by_name(tmp_path):
    sweep(tmp_path, 17)


@pytest.mark.slow
def test_each_field_at_every_value_loads_or_is_refused_by_name(tmp_path):
    sweep(tmp_path, 1)
