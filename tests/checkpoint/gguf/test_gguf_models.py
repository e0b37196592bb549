"""A GGUF file is the model it was made from: configuration, tokenizer, tensors, answers."""

from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.gguf.gguf_models import q4_1, write_gguf
from tests.lib.bits import assert_same_bits
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.gguf.header import read_header
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.pieces import Pieces, part_of
from tpdet.checkpoint.resolve import resolve_model
from tpdet.checkpoint.sample import sample_checkpoint
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.weight_digests import merge_digests
from tpdet.comm.world.world import SoloWorld
from tpdet.errors import CheckpointError
from tpdet.kernels.exact.rotary_frequencies import RotarySpec, inverse_frequencies
from tpdet.runner.start.loading import tokenizer_digests
from tpdet.text.tokenizer import Tokenizer

TEXTS = ("for x in range(12345):\n\treturn None", "e\u0301t\u00e9 \U0001f600 \x00\x7f", "<s> a  b")


def digest(model, shapes, rules=None):
    """Of everything in a checkpoint, read whole; rules: in place of the checkpoint's."""
    checkpoint = open_checkpoint(model)
    checkpoint.rules = checkpoint.rules if rules is None else rules
    source = WeightSource(checkpoint, torch.float32, 0, False)
    for name in checkpoint.names:
        source.read(name, shapes[name], Pieces.whole())
    return merge_digests(SoloWorld(), source.finish()).whole


def shapes_of(model):
    return {k: tuple(v.shape) for k, v in load_file(model / "model.safetensors").items()}


@pytest.mark.parametrize("like", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_file_of_fp32_is_the_model_it_was_made_from(like, tiny_model, tmp_path):
    model = tiny_model(like, sliding_window=64 if like == "mistral" else None)
    path = write_gguf(model, tmp_path / "model.gguf")
    assert load_model_config(path) == load_model_config(model)
    assert digest(path, shapes_of(model)) == digest(model, shapes_of(model))
    assert resolve_model(str(tmp_path)) == resolve_model(str(path)) == path
    assert sample_checkpoint(path, ())


def test_the_tokenizer_and_the_template_come_from_the_file(tiny_model, tmp_path):
    model = tiny_model()
    path = write_gguf(model, tmp_path / "model.gguf")
    ours, theirs = Tokenizer.load(path), Tokenizer.load(model)
    messages = [{"role": "user", "content": "why? <s>"}]
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert ours.info() == theirs.info()
    other = write_gguf(tiny_model(vocab=1050), tmp_path / "other.gguf")
    assert tokenizer_digests(path) != tokenizer_digests(other)


def test_a_quantised_matrix_has_the_rules_values_however_it_is_cut(tiny_model, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf", "Q4_1")
    name, stored = "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"
    checkpoint = open_checkpoint(path)
    entry = read_header(path).tensors[stored]
    raw = np.fromfile(path, np.uint8, entry.size, offset=entry.offset)
    rows = q4_1(raw.reshape(-1, entry.row_bytes))
    heads, (outputs, inputs) = 8, entry.shape
    expected = torch.stack([rows.view(heads, -1, 2, inputs)[:, :, half] for half in (0, 1)], 1)
    expected = expected.reshape(outputs, inputs)
    whole = checkpoint.piece(part_of(name, entry.shape, 0, 0, outputs))
    assert_same_bits(whole, expected)
    assert_same_bits(
        checkpoint.piece(part_of(name, entry.shape, 0, 70, 131)), expected[70:131].clone()
    )
    cut = checkpoint.piece(part_of(name, entry.shape, 1, 48, 112))  # begins and ends inside blocks
    assert_same_bits(cut.contiguous(), expected[:, 48:112].contiguous())
    assert checkpoint.rules[name] == "gguf Q4_1"
    assert "model.norm.weight" not in checkpoint.rules


def test_the_rule_is_part_of_the_digest(tiny_model, tmp_path):
    model = tiny_model("llama")
    path = write_gguf(model, tmp_path / "model.gguf", "Q8_0")
    name = "model.layers.0.mlp.up_proj.weight"
    changed = {**open_checkpoint(path).rules, name: "another rule"}
    found = [digest(path, shapes_of(model), rules) for rules in (None, changed, None)]
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_found_in_its_factors(factor, tiny_model, tmp_path):
    spec = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position": 8192}  # fmt: skip
    plain = inverse_frequencies(RotarySpec("default", 500000.0, 64))
    scaled = inverse_frequencies(RotarySpec("llama3", 500000.0, 64, **spec))
    factors = np.array([a / b for a, b in zip(plain, scaled, strict=True)], np.float32)

    def change(writer):
        writer.kv_data[0]["llama.rope.freq_base"].value = 500000.0
        writer.add_tensor("rope_freqs.weight", factors)

    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf", change=change)
    found = load_model_config(path).rotary
    assert (found.kind, found.factor) == ("llama3", pytest.approx(factor))
    factors[3] *= 1.01
    path = write_gguf(tiny_model("llama"), tmp_path / "other.gguf", change=change)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has other factors"):
        load_model_config(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_uint32("llama.something", 3), r"llama\.something is 3: tpdet cannot"),
        (lambda w: w.add_expert_count(8), r"expert_count is 8: models with experts"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "only linear and yarn"),
        (lambda w: w.add_rope_dimension_count(32), "rope.dimension_count is 32: only heads"),
        (lambda w: w.add_uint16("split.count", 3), "llama-gguf-split"),
    ],
)
def test_a_setting_that_is_not_supported_is_refused_by_name(change, message, tiny_model, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf", change=change)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(path)


def test_several_files_of_one_directory_are_not_guessed_at(tiny_model, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF files: name one, such as .*a\.gguf"):
        resolve_model(str(tmp_path))


def test_sentencepieces_merges_follow_from_its_scores(tmp_path):
    texts = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "cab", "▁c"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *texts]
    scores = dict.fromkeys(tokens, 0.0) | {t: -float(i) for i, t in enumerate(texts)}
    scores["bc"] = 5.0  # merged first, though "ab" has the lower id
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([scores[token] for token in tokens])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(texts)])
    for name, id_ in (("unk", 0), ("bos", 1), ("eos", 2)):
        getattr(writer, f"add_{name}_token_id")(id_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.load(tmp_path / "model.gguf")
    for text in ("abc cab", "ab", "a  bc abcabc", "aéb", " "):
        ids = tokenizer.encode(text)
        assert ids[0] == 1 and tokenizer.decode(ids) == text
        parts = list("▁" + text.replace(" ", "▁"))
        while pairs := [
            (-scores[x + y], i) for i, (x, y) in enumerate(pairwise(parts)) if x + y in scores
        ]:
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        expected = [token for part in parts for token in bytes_of(part, scores)]
        assert [tokenizer.token(id_) for id_ in ids[1:]] == expected


def bytes_of(part, known):
    return [part] if part in known else [f"<0x{byte:02X}>" for byte in part.encode()]
