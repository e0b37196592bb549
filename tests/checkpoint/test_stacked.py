"""Experts that lie in one tensor: read as tensors of each, in bf16 and in MXFP4."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.engine_harness import ask, run
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.pieces import part_of
from tpdet.errors import CheckpointError

PROMPT = [5, 6, 7, 8, 9, 10, 11]
BLOCK = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def stored(tiny_model, tmp_path_factory):
    """The folders of one model in MXFP4 and as transformers dequantises it, in bf16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # 2 s of every process

    plain = tiny_model("gpt_oss", hidden=160, intermediate=96, dtype="bfloat16")
    tensors, draw = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(8)
    packed, wide = dict(tensors), dict(tensors)
    for name, values in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = values.shape
            shape = experts, outputs, inputs // 32
            blocks = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(121, 125, shape, generator=draw, dtype=torch.uint8)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            wide[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    folders = []
    for of, found in (("mxfp4", packed), ("bf16", wide)):
        folder = shutil.copytree(plain, tmp_path_factory.mktemp(of) / "model")
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    settings = json.loads((folders[0] / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm"]}
    (folders[0] / "config.json").write_text(json.dumps(settings))
    return folders


def test_mxfp4_experts_have_the_bits_of_the_dequantised_checkpoint(stored):
    packed, wide = (run(folder, [ask("a", PROMPT)]) for folder in stored)
    assert packed.logits.keys() == wide.logits.keys()
    for key, row in packed.logits.items():
        assert_same_bits(row, wide.logits[key], f"{key}")
    mine, theirs = (open_checkpoint(folder) for folder in stored)
    name = f"{BLOCK}.3.up_proj.weight"
    assert mine.rules[name] == "mxfp4 4 bits, group 32" and name not in theirs.rules
    assert mine.names == theirs.names


def test_parts_are_the_gates_the_ups_and_the_rows_asked_for(stored):
    whole = load_file(stored[1] / "model.safetensors")
    for folder in stored:
        checkpoint = open_checkpoint(folder)
        read = lambda *part, of=checkpoint: of.piece(part_of(*part))
        for first, part in enumerate(("gate", "up")):
            wanted = whole[f"{BLOCK}.gate_up_proj"][3].t()[first::2]
            name = f"{BLOCK}.3.{part}_proj"
            assert_same_bits(read(f"{name}.weight", (96, 160), 0, 0, 96).bfloat16(), wanted)
            assert_same_bits(read(f"{name}.weight", (96, 160), 0, 17, 30).bfloat16(), wanted[17:30])
            bias = whole[f"{BLOCK}.gate_up_proj_bias"][3, first::2]
            assert_same_bits(read(f"{name}.bias", (96,), 0, 5, 96), bias[5:])
        down = read(f"{BLOCK}.15.down_proj.weight", (160, 96), 0, 0, 160).bfloat16()
        assert_same_bits(down, whole[f"{BLOCK}.down_proj"][15].t())
        assert not same_bits(down, whole[f"{BLOCK}.down_proj"][14].t())


def damaged(folder, tmp_path, change):
    copy = shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


GATE_UP, DOWN = f"{BLOCK}.gate_up_proj", f"{BLOCK}.down_proj"


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        (
            1,
            lambda t: t.update({GATE_UP: t[GATE_UP][:8].clone()}),
            f"{GATE_UP} has shape .* 16 exp",
        ),
        (1, lambda t: t.update({GATE_UP: t[GATE_UP][..., :191].clone()}), "gates and ups in turn"),
        (1, lambda t: t.update({DOWN: t[DOWN][:, :64].clone()}), r"down_proj.weight has shape"),
        (1, lambda t: t.pop(f"{DOWN}_bias"), r"experts.0.down_proj.bias is in none of"),
        (
            1,
            lambda t: t.update({f"{BLOCK}.3.up_proj.weight": t[DOWN][0].clone()}),
            "also a part of",
        ),
        (0, lambda t: t.pop(f"{DOWN}_scales"), "down_proj.weight_scale is missing"),
        (0, lambda t: t[f"{DOWN}_scales"].fill_(255), "a scale of NaN"),
        (0, lambda t: t.pop("model.layers.1.self_attn.sinks"), "self_attn.sinks is in none of"),
    ],
)
def test_a_wrong_set_of_stacked_experts_is_refused_by_name(stored, tmp_path, form, change, said):
    folder = damaged(stored[form], tmp_path, change)
    with pytest.raises(CheckpointError, match=said):
        run(folder, [ask("a", PROMPT)])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"swiglu_limit": 6.0}, "swiglu_limit is 6.0: only 7.0"),
        ({"attention_bias": False}, "attention_bias is False"),
        ({"experts_per_token": 3}, "experts_per_token is 3: num_experts_per_tok is"),
        ({"rope_scaling": None}, "rope_scaling is None: a complete config.json of gpt_oss"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"quantization_config": {"quant_method": "mxfp4", "bits": 4}}, "quantization_config.bits"),
    ],
)
def test_a_configuration_of_another_model_is_refused(tiny_model, tmp_path, settings, said):
    folder = shutil.copytree(tiny_model("gpt_oss"), tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=said):
        load_model_config(folder)


def test_a_checkpoint_that_names_no_dtype_is_bf16(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("gpt_oss"), tmp_path / "model")
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    del settings["torch_dtype"]
    path.write_text(json.dumps(settings))
    assert load_model_config(folder).dtype == "bfloat16"
