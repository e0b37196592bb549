"""Quantised weights: each form's rule against numbers that were packed here; bad ones refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.model_config.test_model_config import LLAMA
from tests.lib.bits import assert_same_bits
from tpdet import LLM, SamplingParams
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.pieces import part_of
from tpdet.errors import CheckpointError

N, K = 144, 256
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
       "activation_scheme": "dynamic"}  # fmt: skip


BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block"}


def compressed(form, **weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}


def integers(low, high, *shape, seed=1):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def some_scales(*shape):
    made = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.01
    return made.bfloat16()


def packed(values, dim, bits=4, order=range(8)):
    """int32 with the values of each run along `dim`, one by one; order: AWQ's."""
    each = 32 // bits
    columns = values if dim == 1 else values.T
    found = torch.zeros(len(columns), -(-columns.shape[1] // each), dtype=torch.int64)
    for index in range(columns.shape[1]):
        nibble = [*order][:each].index(index % each) if each == 8 else index % each
        found[:, index // each] |= columns[:, index].long() << (bits * nibble)
    found = torch.where(found >= 1 << 31, found - (1 << 32), found).int()
    return (found if dim == 1 else found.T).contiguous()


def of_blocks(rows=N, columns=K):
    q = (integers(-90, 90, rows, columns) / 8).to(torch.float8_e4m3fn)
    s = some_scales(-(-rows // 128), -(-columns // 128)).float()
    wide = torch.stack([s[i // 128, torch.arange(columns) // 128] for i in range(rows)])
    return q, s, q.float() * wide


def fp8_block(rows=N, columns=K):
    q, s, expected = of_blocks(rows, columns)
    return FP8, {"weight": q, "weight_scale_inv": s}, expected


def compressed_fp8_block(rows=N, columns=K, form="float-quantized"):
    q, s, expected = of_blocks(rows, columns)
    blocks = {"strategy": "block", "block_structure": [128, 128]}
    config = compressed(form, num_bits=8, type="float", **blocks)
    return config, {"weight": q, "weight_scale": s}, expected


def fp8_channel(rows=N, columns=K):
    q, s = (integers(-90, 90, rows, columns) / 8).to(torch.float8_e4m3fn), some_scales(rows, 1)
    form = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    return form, {"weight": q, "weight_scale": s}, q.float() * s.float()


def awq(rows=N, columns=K):
    q, z, s = (
        integers(0, 16, columns, rows),
        integers(0, 16, columns // 64, rows, seed=3),
        some_scales(columns // 64, rows),
    )
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {"qweight": packed(q, 1, order=order), "qzeros": packed(z, 1, order=order)}
    group = torch.arange(columns) // 64
    return AWQ, parts | {"scales": s.half()}, ((q - z[group]) * s.half().float()[group]).T


def gptq(rows=N, columns=K, version="gptq", stored=1):
    q, z = integers(0, 16, columns, rows), integers(1, 16, columns // 64, rows, seed=3)
    s, group = some_scales(columns // 64, rows).half(), torch.arange(columns) // 64
    parts = {"qweight": packed(q, 0), "qzeros": packed(z - stored, 1), "scales": s}
    form = GPTQ | {"checkpoint_format": version}
    return form, parts | {"g_idx": group.int()}, ((q - z[group]) * s.float()[group]).T


def gptq_v2(rows=N, columns=K):
    return gptq(rows, columns, "gptq_v2", 0)


def packed_int(bits, group, symmetric, rows=N, columns=K):
    groups = columns // group if group else 1
    q, s = integers(0, 1 << bits, rows, columns), some_scales(rows, groups)
    z = torch.full((rows, groups), 1 << (bits - 1))
    if not symmetric:
        z = integers(0, 1 << bits, rows, groups, seed=3)
    parts = {
        "weight_packed": packed(q, 1, bits),
        "weight_scale": s,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        parts["weight_zero_point"] = packed(z, 0, bits)
    of = torch.arange(columns) // (group or columns)
    form = compressed(
        "pack-quantized",
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="group" if group else "channel",
        group_size=group or -1,
    )
    return form, parts, (q - z[:, of]) * s.float()[:, of]


def w4a16(rows=N, columns=K):
    return packed_int(4, 32, True, rows, columns)


def w4a16_with_zero_points(rows=N, columns=K):
    return packed_int(4, 128, False, rows, columns)


def w8a16(rows=N, columns=K):
    return packed_int(8, 0, True, rows, columns)


def w8a16_with_zero_points(rows=N, columns=K):
    return packed_int(8, 64, False, rows, columns)


def mxfp4(rows=N, columns=K):
    q, e = integers(0, 16, rows, columns), integers(100, 130, rows, columns // 32, seed=3)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = values[q & 7] * (1 - 2 * (q >> 3))
    form = compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
    )
    parts = {
        "weight_packed": (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": e.to(torch.uint8),
    }
    return form, parts, numbers * 2.0 ** (e[:, torch.arange(columns) // 32] - 127.0)


MADE = (
    fp8_block, compressed_fp8_block, fp8_channel, awq, gptq, gptq_v2, w4a16,
    w4a16_with_zero_points, w8a16, w8a16_with_zero_points, mxfp4,
)  # fmt: skip


def written(folder, config, parts):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": config}))
    tensors = {f"a.{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("make", MADE)
def test_a_form_has_its_rules_values_however_it_is_cut(make, tmp_path):
    config, parts, expected = make()
    checkpoint = open_checkpoint(written(tmp_path, config, parts))
    expected = expected.float().contiguous()
    assert checkpoint.names == ("a.weight",) and list(checkpoint.rules) == ["a.weight"]
    for dim, first, last in ((0, 0, N), (0, 70, 131), (1, 48, 112), (1, 240, 256)):
        found = checkpoint.piece(part_of("a.weight", (N, K), dim, first, last))
        assert_same_bits(found.contiguous(), expected.narrow(dim, first, last - first).contiguous())


@pytest.mark.parametrize(("rows", "columns"), [(200, 176), (128, 129), (127, 128), (1, 257)])
def test_blocks_at_the_edges_have_scales_of_their_own(rows, columns, tmp_path):
    config, parts, expected = compressed_fp8_block(rows, columns, "naive-quantized")
    checkpoint = open_checkpoint(written(tmp_path, config, parts))
    for dim, extent in enumerate((rows, columns)):
        for first, last in ((0, extent), (extent - 1, extent), (extent // 3, extent)):
            found = checkpoint.piece(part_of("a.weight", (rows, columns), dim, first, last))
            assert_same_bits(found, expected.narrow(dim, first, last - first).contiguous())


@pytest.mark.parametrize("make", MADE)
def test_a_part_that_is_missing_or_wrong_is_refused_by_name(make, tmp_path):
    config, parts, _ = make()
    marker = next(iter(parts))
    for name in parts:
        if name in (marker, "g_idx"):
            continue
        rest = {key: tensor for key, tensor in parts.items() if key != name}
        with pytest.raises(CheckpointError, match=rf"tensor a\.{name} is missing"):
            open_checkpoint(written(tmp_path, config, rest))
        short = parts | {name: parts[name][:-1]}
        with pytest.raises(CheckpointError, match=rf"tensor a\.{name} is"):
            open_checkpoint(written(tmp_path, config, short)).piece(
                part_of("a.weight", (N, K), 0, 0, N)
            )


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("make", [make for make in MADE if make is not mxfp4])
def test_a_scale_of_zero_nan_or_infinity_is_refused(make, value, tmp_path):
    config, parts, _ = make()
    (name,) = [key for key in parts if "scale" in key]
    parts[name].view(-1)[-1] = value
    checkpoint = open_checkpoint(written(tmp_path, config, parts))
    with pytest.raises(CheckpointError, match=rf"a\.{name} holds a scale of zero, NaN or inf"):
        checkpoint.piece(part_of("a.weight", (N, K), 0, 0, N))


def test_a_scale_of_mxfp4_that_is_no_number_is_refused(tmp_path):
    config, parts, _ = mxfp4()
    parts["weight_scale"][3, 2] = 255
    with pytest.raises(CheckpointError, match=r"a\.weight_scale holds a scale of NaN"):
        open_checkpoint(written(tmp_path, config, parts)).piece(
            part_of("a.weight", (N, K), 0, 0, N)
        )


def test_columns_in_another_order_are_refused(tmp_path):
    config, parts, _ = gptq()
    parts["g_idx"] = parts["g_idx"].flip(0)
    with pytest.raises(CheckpointError, match=r"a\.g_idx has columns in another order"):
        open_checkpoint(written(tmp_path, config, parts)).piece(
            part_of("a.weight", (N, K), 0, 0, N)
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        (AWQ | {"group_size": 48}, "group_size is 48"),
        (AWQ | {"bits": 3}, "bits is 3"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'"),
        (GPTQ | {"desc_act": True}, "desc_act is True"),
        (GPTQ | {"new": 1}, "unknown key 'quantization_config.new'"),
        (FP8 | {"weight_block_size": None}, "weight_block_size is None"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme is 'static'"),
        (compressed("int-quantized", num_bits=8, type="int"), "format is 'int-quantized'"),
        (compressed("pack-quantized", num_bits=4, type="int", actorder="group"), "actorder is"),
        (compressed("pack-quantized", num_bits=2, type="int"), "num_bits is 2"),
        (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), "strategy"),
        (
            compressed("float-quantized", **BLOCKS | {"block_structure": [64, 128]}),
            r"block_structure is \[64, 128\]",
        ),
        (compressed("float-quantized", **BLOCKS), "block_structure is None"),
        (compressed("float-quantized", **BLOCKS, symmetric=False), "symmetric is False"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        (FP8 | {"ignored_layers": [1]}, r"ignored_layers is \[1\]"),
    ],
)
def test_a_form_that_is_not_known_is_refused_by_name(config, message, tiny_model, tmp_path):
    values = json.loads((tiny_model() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


def test_a_quantised_model_answers_as_the_dense_one_of_its_values(tiny_model, tmp_path):
    values = json.loads((tiny_model() / "config.json").read_text())
    dense, quantised = {}, {}
    for name, tensor in load_file(tiny_model() / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            dense[name] = quantised[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 448
        quantised[name] = (tensor / scale).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale"] = scale
        dense[name] = quantised[name].float() * scale
    form = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    answers = []
    for name, tensors, more in (("d", dense, {}), ("q", quantised, {"quantization_config": form})):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(values | more))
        settings = {"kv_pages": 8, "max_model_len": 256, "skip_tokenizer_init": True}
        with LLM(str(tmp_path / name), device="cpu", **settings) as llm:
            params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, logprobs=1)
            choice = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0]
            answers.append((llm.system_fingerprint, choice.token_ids, choice.logprob_bits))
    assert answers[0][1:] == answers[1][1:]
    assert answers[0][0] != answers[1][0]
