"""`tpdet quantise`: whole checkpoints, which our reader and transformers' read with equal bits."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.checkpoint.test_quantised_codes import e2m1_values, e4m3_values
from tests.lib.bits import assert_same_bits
from tpdet import LLM, SamplingParams
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.pieces import part_of
from tpdet.tools.quantise.arguments import FORMATS
from tpdet.tools.quantise.encodings import ENCODINGS

MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe")
SOME_SLOW = ("int4-g128", *(pytest.param(name, marks=pytest.mark.slow) for name in FORMATS[::2]))


def stored(folder):
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def dequantised(format_name, tensors, stem):
    """A matrix of the parts, by the formats' definitions, in bf16."""
    scale = tensors[f"{stem}.weight_scale"]
    if format_name == "fp8-block":
        codes = tensors[f"{stem}.weight"].view(torch.uint8).int()
        rows, columns = (torch.arange(extent) // 128 for extent in codes.shape)
        wide = scale.double()[rows][:, columns]
        return (torch.from_numpy(e4m3_values())[codes] * wide).float().bfloat16()
    packed = tensors[f"{stem}.weight_packed"].view(torch.uint8).int()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    if format_name == "mxfp4":
        wide = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
        return (torch.from_numpy(e2m1_values())[codes] * wide).float().bfloat16()
    return ((codes - 8) * scale.double().repeat_interleave(128, 1)).float().bfloat16()


def quantise(tpdet, model, target, format_name):
    code, _, error = tpdet("quantise", model, "--format", format_name, "--output", target)
    assert code == 0, error
    return target


@pytest.mark.parametrize("format_name", FORMATS)
def test_our_reader_has_the_bits_of_an_independent_one(format_name, tiny_model, tpdet, tmp_path):
    model = tiny_model("qwen3", dtype="bfloat16")
    target = quantise(tpdet, model, tmp_path / "q", format_name)
    before, after = stored(model), stored(target)
    checkpoint = open_checkpoint(target)
    products = [name for name in before if name.endswith("_proj.weight")]
    assert {*checkpoint.rules} == {*products} and len(products) == 14
    for name, tensor in before.items():
        if name not in checkpoint.rules:
            assert_same_bits(after[name], tensor)
            continue
        expected = dequantised(format_name, after, name.removesuffix(".weight"))
        shape = tuple(tensor.shape)
        assert_same_bits(
            checkpoint.piece(part_of(name, shape, 0, 0, shape[0])).bfloat16(), expected
        )
        error = (expected.float() - tensor.float()).norm() / tensor.float().norm()
        assert error < (0.04 if format_name == "fp8-block" else 0.15)


@pytest.mark.parametrize("format_name", SOME_SLOW)
def test_a_quantised_model_answers_as_the_dense_one_of_its_values(
    format_name, tiny_model, tpdet, tmp_path
):
    model = tiny_model("qwen3", dtype="bfloat16")
    target = quantise(tpdet, model, tmp_path / "q", format_name)
    dense = tmp_path / "dense"
    shutil.copytree(model, dense)
    tensors, after = stored(model), stored(target)
    for name in tensors:
        if name.endswith("_proj.weight"):
            tensors[name] = dequantised(format_name, after, name.removesuffix(".weight"))
    save_file(tensors, dense / "model.safetensors")
    answers = []
    for folder in (target, dense):
        with LLM(str(folder), device="cpu", kv_pages=8, max_model_len=256) as llm:
            params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, logprobs=1)
            choice = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0]
            answers.append((choice.token_ids, choice.logprob_bits))
    assert answers[0] == answers[1]


def test_shards_stay_and_the_bytes_are_always_the_same(tiny_model, tpdet, tmp_path):
    model = tiny_model("qwen3", dtype="bfloat16", shards=3)
    targets = [quantise(tpdet, model, tmp_path / name, "int4-g128") for name in "ab"]
    files = sorted(path.name for path in targets[0].iterdir())
    assert files == sorted(path.name for path in model.iterdir())
    for file in files:
        assert (targets[0] / file).read_bytes() == (targets[1] / file).read_bytes()
        if file != "config.json" and "model" not in file:
            assert (targets[0] / file).read_bytes() == (model / file).read_bytes()
    index = json.loads((targets[0] / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(targets[0] / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118, it has no other way
    assert len(open_checkpoint(targets[0]).rules) == 14


@pytest.mark.parametrize("like", MIXTURES)
def test_routers_and_heads_stay_as_they_are(like, tiny_model, tpdet, tmp_path):
    model = tiny_model(like, dtype="bfloat16")
    target = quantise(tpdet, model, tmp_path / "q", "mxfp4")
    before, after = stored(model), stored(target)
    checkpoint = open_checkpoint(target)
    config = json.loads((target / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    routers = [stem for stem in ignored if stem.endswith(".gate")]
    assert routers and {*ignored} - {*routers} <= {"lm_head"}
    matrices = {name for name, tensor in before.items() if tensor.dim() == 2}
    left = {f"{stem}.weight" for stem in ignored} | {"model.embed_tokens.weight"}
    assert {*checkpoint.rules} == matrices - left
    for name in left & {*before}:
        assert_same_bits(after[name], before[name])


@pytest.mark.parametrize("like", ["phi3", pytest.param("starcoder2", marks=pytest.mark.slow)])
def test_fused_and_plain_blocks_are_read_again(like, tiny_model, tpdet, tmp_path):
    model = tiny_model(like, dtype="bfloat16")
    target = quantise(tpdet, model, tmp_path / "q", "fp8-block")
    with LLM(str(target), device="cpu", kv_pages=8, max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=2)
        assert len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_a_model_in_fp16_may_be_quantised(tiny_model, tpdet, tmp_path):
    target = quantise(tpdet, tiny_model("llama", dtype="float16"), tmp_path / "q", "fp8-block")
    for name, tensor in stored(target).items():
        assert tensor.dtype == torch.bfloat16 or not name.endswith("_scale")


class TestRefusals:
    """What cannot be written is refused by name, and leaves nothing behind."""

    def refused(self, tpdet, model, target, format_name, code, message):
        found, _, error = tpdet("quantise", model, "--format", format_name, "--output", target)
        assert (found, error.count("\n")) == (code, 1)
        assert message in error
        assert not target.exists() or any(target.iterdir())
        assert not [path for path in target.parent.iterdir() if path.name.startswith(".")]

    def test_a_model_that_is_quantised(self, tiny_model, tpdet, tmp_path):
        target = quantise(tpdet, tiny_model(), tmp_path / "q", "mxfp4")
        self.refused(tpdet, target, tmp_path / "r", "mxfp4", 2, "is quantised already")

    def test_inputs_that_are_no_groups(self, tiny_model, tpdet, tmp_path):
        model = tiny_model("qwen3_moe")
        message = "has 96 inputs, which are no groups of 128: use --format fp8-block"
        self.refused(tpdet, model, tmp_path / "q", "int4-g128", 2, message)

    def test_experts_in_one_tensor(self, tiny_model, tpdet, tmp_path):
        message = "has all experts of a layer"
        self.refused(tpdet, tiny_model("gpt_oss"), tmp_path / "q", "fp8-block", 2, message)

    def test_a_folder_with_something_in_it(self, tiny_model, tpdet, tmp_path):
        (tmp_path / "q").mkdir()
        (tmp_path / "q" / "note").write_text("mine")
        self.refused(tpdet, tiny_model(), tmp_path / "q", "mxfp4", 2, "is not empty")

    @pytest.mark.parametrize("value", [float("nan"), float("-inf")])
    def test_weights_that_are_no_numbers(self, value, tiny_model, tpdet, tmp_path):
        model = tmp_path / "m"
        shutil.copytree(tiny_model(), model)
        tensors = stored(model)
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][2, 3] = value
        save_file(tensors, model / "model.safetensors")
        message = f"tensor {name} holds NaN or infinity"
        self.refused(tpdet, model, tmp_path / "q", "fp8-block", 65, message)

    def test_an_unknown_format(self, tiny_model, tpdet, tmp_path):
        code, _, error = tpdet("quantise", tiny_model(), "--format", "int3", "--output", tmp_path)
        assert code == 2 and "int3" in error


@pytest.mark.slow
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("like", ["qwen3", "llama", "starcoder2", "phi3"])
def test_transformers_reads_it_with_the_same_bits(format_name, like, tiny_model, tpdet, tmp_path):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model = tiny_model(like, dtype="bfloat16")
    target = quantise(tpdet, model, tmp_path / "q", format_name)
    theirs = AutoModelForCausalLM.from_pretrained(
        target, dtype="bfloat16", quantization_config=CompressedTensorsConfig(dequantize=True)
    ).state_dict()
    after = stored(target)
    stems = {name.rpartition(".")[0] for name in after if name.endswith(".weight_scale")}
    assert len(stems) >= 8
    for stem in stems:
        assert_same_bits(theirs[f"{stem}.weight"], dequantised(format_name, after, stem))


@pytest.mark.slow
@pytest.mark.parametrize("format_name", FORMATS)
def test_what_compressed_tensors_packs_is_what_we_read(format_name, tmp_path):
    """Its compressor, with our scales: the same parts, so neither reads by a layout of its own."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    encoding = ENCODINGS[format_name]
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(256, 384, generator=generator).bfloat16()
    parts = encoding.encode(weight.float())
    scheme = QuantizationScheme(targets=["Linear"], weights=dict(encoding.weights))
    compressor = BaseCompressor.get_value_from_registry(encoding.format)
    scale = parts["weight_scale"]
    if format_name == "mxfp4":
        scale = torch.exp2(scale.float() - 127).bfloat16()
    state = {"weight": weight.float(), "weight_scale": scale}
    theirs = compressor.compress(state, scheme)
    for suffix in parts:
        if suffix in ("weight", "weight_packed"):
            same = (theirs[suffix].view(torch.uint8) == parts[suffix].view(torch.uint8)).float()
            assert same.mean() > 0.999  # it divides in another dtype
