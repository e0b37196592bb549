"""GGUF files of hybrids: what llama.cpp's converter changed is undone, whole and in pieces."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.gguf.gguf_models import write_gguf
from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import run
from tests.lib.hybrid_answers import LONG, SHORT, asked, digest
from tpdet.checkpoint.checkpoint import open_checkpoint, stored_tensors
from tpdet.checkpoint.forms.parts import in_parts
from tpdet.checkpoint.gguf.header import read_header
from tpdet.checkpoint.gguf.tensors import gguf_tensors
from tpdet.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.pieces import part_of
from tpdet.checkpoint.sample import sample_checkpoint
from tpdet.errors import CheckpointError

HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@pytest.fixture
def pair(tiny_model, tmp_path):
    """A function: like -> a file, and a directory with the values that it stands for."""

    def make(like, kind="F32", **options):
        model, twin = tiny_model(like, layers=4), tmp_path / "twin"
        shutil.copytree(model, twin)
        tensors = load_file(model / "model.safetensors")
        for name, values in tensors.items():
            if name.endswith("norm.weight") and ".linear_attn." not in name:
                tensors[name] = values + 1.0 - 1.0
            elif name.endswith("A_log"):
                stored = torch.from_numpy(np.exp(values.numpy()))
                tensors[name] = stored.double().log().float()
        save_file(tensors, twin / "model.safetensors")
        return write_gguf(model, tmp_path / "model.gguf", kind, **options), twin

    return make


def opened(model):
    """The tensors of a file or a directory by the names that a model reads, as they are read."""
    stored = gguf_tensors(read_header(model)) if model.is_file() else stored_tensors(model)[0]
    return in_parts(stored, read_stored_form(model))


@pytest.mark.parametrize("like", HYBRIDS)
def test_a_file_of_a_hybrid_is_the_model_it_was_made_from(like, pair):
    path, twin = pair(like)
    assert load_model_config(path) == load_model_config(twin)
    ours, theirs = opened(path), opened(twin)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        read, wanted = tensor.open(), theirs[name].open()
        assert read.get_shape() == wanted.get_shape(), name
        assert_same_bits(read[:].contiguous(), wanted[:].contiguous())
    assert sample_checkpoint(path, ())


def test_answers_of_a_file_are_those_of_its_values(pair):
    few = {"max_num_seqs": 2} | SHORT
    found = [run(str(model), [asked(LONG[:70])], **few) for model in pair("qwen3_5_text")]
    assert digest(found[0]) == digest(found[1])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_heads_are_put_in_order_however_they_are_cut(kind, pair):
    tensors = opened(pair("qwen3_5_moe_text", kind)[0])
    parts = [f"linear_attn.{part}" for part in ("in_proj_v", "in_proj_z", "out_proj")]
    for part in (*parts, "mlp.experts.3.gate_proj"):
        tensor = tensors[f"model.layers.0.{part}.weight"]
        read = tensor.open()
        every = read[:].contiguous()
        assert tensor.rule == f"gguf {kind}"
        assert_same_bits(read[70:90].contiguous(), every[70:90].contiguous())
        assert_same_bits(read[:, 48:144].contiguous(), every[:, 48:144].contiguous())


def test_layers_that_guess_further_tokens_are_not_read(pair):
    def change(writer):
        writer.kv_data[0]["qwen35.block_count"].value = 5
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "attn_q", "ffn_gate"):
            writer.add_tensor(f"blk.4.{name}.weight", np.ones((32, 32), np.float32))

    path, twin = pair("qwen3_5_text", change=change)
    assert load_model_config(path) == load_model_config(twin)
    assert opened(path).keys() == opened(twin).keys()


def test_the_split_of_the_family_keeps_marks_with_their_letters(tiny_model, tmp_path):
    def change(writer):
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "qwen35"

    path = write_gguf(tiny_model("qwen3_5_text", layers=4), tmp_path / "model.gguf", change=change)
    steps = json.loads(read_gguf_tokenizer(path)[0])["pre_tokenizer"]["pretokenizers"]
    assert r"[\p{L}\p{M}]+" in steps[0]["pattern"]["Regex"]


def removed(field):
    return lambda writer: writer.kv_data[0].pop(f"qwen35.{field}")


def changed(field, value):
    return lambda writer: setattr(writer.kv_data[0][f"qwen35.{field}"], "value", value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("ssm.conv_kernel", 3), r"qwen35\.ssm\.conv_kernel is 3: only 4"),
        (changed("ssm.time_step_rank", 12), r"ssm\.time_step_rank is 12: .* multiple of 8 key"),
        (changed("ssm.inner_size", 770), r"ssm\.inner_size is 770: .* multiple of 16 value"),
        (removed("ssm.group_count"), r"ssm\.group_count"),
        (changed("rope.dimension_count", 65), r"rope\.dimension_count is 65"),
        (lambda w: w.add_nextn_predict_layers(4), r"nextn_predict_layers is 4"),
        (lambda w: w.add_expert_count(8), r"qwen35\.expert_count is 8: models with experts"),
        (lambda w: w.add_array("qwen35.attention.recurrent_layers", [0, 1]), "cannot tell"),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(change, message, pair):
    path, _ = pair("qwen3_5_text", change=change, tokenizer=False)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(path)


@pytest.mark.parametrize("value", [0.0, 2.0, float("nan")])
def test_a_decay_that_is_none_is_refused_by_its_name(value, pair):
    path, _ = pair("qwen3_5_text", tokenizer=False)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == "blk.1.ssm_a":
            tensor.data[3] = value
            tensor.data.flush()
    with pytest.raises(CheckpointError, match=r"layers\.1\.linear_attn\.A_log holds NaN"):
        open_checkpoint(path).piece(part_of("model.layers.1.linear_attn.A_log", (16,), 0, 0, 16))
