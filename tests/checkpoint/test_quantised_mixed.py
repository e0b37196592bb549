"""Checkpoints with several forms, modules that are left out, and quantised fused tensors."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.model_config.test_model_config import LLAMA
from tests.checkpoint.test_quantised import (
    FP8,
    K,
    N,
    compressed_fp8_block,
    fp8_block,
    fp8_channel,
    mxfp4,
    packed_int,
    w4a16,
    w4a16_with_zero_points,
    w8a16,
)
from tests.lib.bits import assert_same_bits
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.pieces import part_of
from tpdet.errors import CheckpointError


def of_fours(rows=N, columns=K):
    return packed_int(4, 128, True, rows, columns)


MIXED = (
    fp8_channel, compressed_fp8_block, w4a16, of_fours, w4a16_with_zero_points, w8a16, mxfp4
)  # fmt: skip


def mixed(*configs, **more):
    """One config of several, each in a group of its own."""
    groups = {}
    for number, config in enumerate(configs):
        group = {"format": config["format"], "targets": [rf"re:.*layers\.{number}\..*"]}
        groups[f"group_{number}"] = config["config_groups"]["g"] | group
    named = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    return named | {"config_groups": groups} | more


def opened(folder, quantisation, matrices, config=LLAMA):
    """matrices: by stem, parts by name."""
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    tensors = {
        f"{stem}.{name}": tensor.contiguous()
        for stem, parts in matrices.items()
        for name, tensor in parts.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def test_each_matrix_has_the_form_in_which_it_is_stored(tmp_path):
    made = {make.__name__: make() for make in MIXED}
    config = mixed(*(config for config, _, _ in made.values()))
    plain = {"plain": {"weight": torch.ones(N, K)}}
    checkpoint = opened(tmp_path, config, {n: parts for n, (_, parts, _) in made.items()} | plain)
    assert checkpoint.rules == {
        "fp8_channel.weight": "fp8 channel 8 bits, channel",
        "compressed_fp8_block.weight": "fp8 block 8 bits, group 128",
        "w4a16.weight": "packed int 4 bits, group 32",
        "of_fours.weight": "packed int 4 bits, group 128",
        "w4a16_with_zero_points.weight": "packed int 4 bits, group 128",
        "w8a16.weight": "packed int 8 bits, channel",
        "mxfp4.weight": "mxfp4 4 bits, group 32",
    }
    for name, (_, _, expected) in made.items():
        found = checkpoint.piece(part_of(f"{name}.weight", (N, K), 0, 0, N))
        assert_same_bits(found, expected.float().contiguous())


@pytest.mark.parametrize("make", MIXED)
def test_a_matrix_in_a_form_that_no_group_has_is_refused(make, tmp_path):
    _, parts, _ = make()
    others = [other()[0] for other in MIXED if other is not make]
    with pytest.raises(CheckpointError, match="tensor a") as refusal:
        opened(tmp_path, mixed(*others), {"a": parts}).piece(part_of("a.weight", (N, K), 0, 0, N))
    assert "\n" not in str(refusal.value)


def test_a_matrix_that_fits_two_groups_is_refused(tmp_path):
    block, channel = compressed_fp8_block(1, 100), fp8_channel()[0]
    with pytest.raises(CheckpointError, match=r"tensor a may be fp8 channel .* or fp8 block"):
        opened(tmp_path, mixed(channel, block[0]), {"a": block[1]})


def test_two_groups_of_one_form_are_one(tmp_path):
    config, parts, expected = fp8_channel()
    checkpoint = opened(tmp_path, mixed(config, config), {"a": parts})
    assert_same_bits(checkpoint.piece(part_of("a.weight", (N, K), 0, 0, N)), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (mixed(fp8_channel()[0]) | {"format": "pack-quantized"}, r"g.*format is 'float-quantized'"),
        (mixed(fp8_channel()[0] | {"format": "nvfp4-pack-quantized"}), "format is 'nvfp4"),
        (mixed(fp8_channel()[0] | {"format": None}), "format is missing"),
        (mixed(), "config_groups is {}"),
        (mixed(fp8_channel()[0], ignore=["a", 3]), r"ignore is \['a', 3\]"),
        (mixed(fp8_channel()[0], moe_sparsity_config={"a": 1}), "moe_sparsity_config is"),
    ],
)
def test_groups_that_contradict_are_refused_by_name(config, message, tiny_model, tmp_path):
    values = json.loads((tiny_model() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_a_module_that_is_left_out_and_quantised_is_refused(key, tmp_path):
    _, parts, _ = fp8_block()
    matrices = {"a": parts, "b": {"weight": torch.ones(N, K)}}
    assert opened(tmp_path, FP8 | {key: ["b", "lm_head"]}, matrices).rules.keys() == {"a.weight"}
    with pytest.raises(CheckpointError, match=r"a\.weight is quantised, though .* that a is not"):
        opened(tmp_path, FP8 | {key: ["a"]}, matrices)


@pytest.mark.parametrize("make", [fp8_block, w4a16_with_zero_points, mxfp4])
def test_a_fused_matrix_is_read_in_parts(make, tiny_model, tmp_path):
    values = json.loads((tiny_model("phi3") / "config.json").read_text())
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 96, "head_dim": 24}
    config, parts, expected = make()
    fused = {"model.layers.0.self_attn.qkv_proj": parts}
    checkpoint = opened(tmp_path, config, fused, values | heads)
    first = 0
    for part, rows in (("q", 96), ("k", 24), ("v", 24)):
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        assert "bits" in checkpoint.rules[name]
        found = checkpoint.piece(part_of(name, (rows, K), 0, 3, rows))
        assert_same_bits(found, expected[first + 3 : first + rows].float().contiguous())
        first += rows
