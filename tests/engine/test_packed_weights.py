"""Packed weights: the bits and the digest of dequantised ones at every size, in less memory."""

import gc
import json
import logging
import random
import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoint.test_quantised import MADE, fp8_channel
from tests.checkpoint.test_quantised_mixed import MIXED, mixed
from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run
from tests.tools.quantise.test_quantise import SOME_SLOW
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.config import EngineConfig
from tpdet.errors import ReloadError, UsageError, WeightUpdateError
from tpdet.kernels.inputs.packed import PackedMatrix
from tpdet.tools.quantise.arguments import FORMATS

_random = random.Random(5)
PROMPT = [_random.randrange(1024) for _ in range(300)]
REQUESTS = [ask("a", PROMPT, max_tokens=3), ask("b", PROMPT[:20], max_tokens=3)]
SIZES = [
    pytest.param(name, tp, marks=() if (name, tp) == ("int4-g128", 1) else pytest.mark.slow)
    for name in FORMATS
    for tp in (1, 2, 4, 8)
]
FAMILIES = (
    "phi3", "starcoder2", "gemma3_text", "olmo2", "qwen3_moe", "mixtral", "glm4_moe", "glm4",
)  # fmt: skip


@pytest.fixture(scope="module")
def quantised(tiny_model, tmp_path_factory):
    """A function that quantises (once) a tiny model, and returns its directory."""
    made = {}

    def of(like, format_name, **options):
        from tpdet.cli import main

        key = like, format_name, *options.items()
        if key not in made:
            model = tiny_model(like, dtype="bfloat16", **options)
            made[key] = tmp_path_factory.mktemp(like) / "q"
            code = main(
                ["quantise", str(model), "--format", format_name, "--output", str(made[key])]
            )
            assert code == 0
        return made[key]

    return of


@pytest.fixture(scope="module")
def dense(request):
    """A function that runs a model with dense weights (once), at one rank."""
    runs = {}

    def of(model, **settings):
        key = str(model), *settings.items()
        if key not in runs:
            runs[key] = run(model, REQUESTS, weights="dense", **settings)
        return runs[key]

    return of


def assert_packed_alike(model, dense, tp=1, **settings):
    expected = dense(model, **settings)
    found = run(model, REQUESTS, tp=tp, weights="packed", **settings)
    assert found.fingerprint == expected.fingerprint
    assert found.logits.keys() == expected.logits.keys() and len(found.logits) > 5
    for key, logits in expected.logits.items():
        assert_same_bits(found.logits[key], logits, str(key))


@pytest.mark.parametrize(("format_name", "tp"), SIZES)
def test_the_bits_are_those_of_dense_weights_at_every_size(format_name, tp, quantised, dense):
    """A leaf of the last product has 48 columns, so leaves end inside groups of scales."""
    assert_packed_alike(quantised("qwen3", format_name, heads=8, kv_heads=2), dense, tp)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("like", FAMILIES)
def test_families_have_the_bits_of_dense_weights(like, tp, quantised, dense):
    format_name = "mxfp4" if like in ("qwen3_moe", "glm4_moe") else "fp8-block"
    assert_packed_alike(quantised(like, format_name), dense, tp)


@pytest.mark.parametrize(
    ("tp", "experts"),
    [(1, "lanes"), *(pytest.param(2, e, marks=pytest.mark.slow) for e in ("lanes", "columns"))],
)
def test_experts_have_the_bits_of_dense_weights(tp, experts, quantised, dense):
    assert_packed_alike(quantised("qwen3_moe", "mxfp4"), dense, tp, experts=experts)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gathered_row_layers_have_the_bits_of_dense_weights(tp, quantised, dense):
    assert_packed_alike(quantised("llama", "int4-g128"), dense, tp, row_layers="gather")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_other_dtypes_have_the_bits_of_dense_weights(format_name, dtype, quantised, dense):
    assert_packed_alike(quantised("qwen3", format_name), dense, 2, dtype=dtype)


@pytest.mark.slow
def test_heads_that_pad_a_rank_stay_packed(quantised, dense):
    model = quantised("qwen3", "fp8-block", heads=6, kv_heads=2)
    assert_packed_alike(model, dense, 2)


def of_codes(model, target, makers, config):
    """The model with random codes in place of each product's weight; makers in turn."""
    shutil.copytree(model, target)
    tensors = load_file(model / "model.safetensors")
    names = [name for name in tensors if name.endswith("_proj.weight")]
    for number, name in enumerate(names):
        make = makers[number // 7 % len(makers)]
        _, parts, _ = make(*tensors.pop(name).shape)
        for suffix, part in parts.items():
            scaled = part * 2**-9 if part.is_floating_point() and part.itemsize > 1 else part
            if make.__name__ == "mxfp4" and suffix == "weight_scale":
                scaled = part - 20
            tensors[f"{name.removesuffix('weight')}{suffix}"] = scaled.contiguous()
    save_file(tensors, target / "model.safetensors")
    values = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return target


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("make", MADE)
def test_each_stored_form_has_the_bits_of_dense_weights(make, tp, tiny_model, dense, tmp_path):
    model = tiny_model("qwen3", dtype="bfloat16", heads=8, kv_heads=2)
    assert_packed_alike(of_codes(model, tmp_path / "m", [make], make(8, 256)[0]), dense, tp)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_layers_may_have_other_forms(tp, tiny_model, dense, tmp_path):
    model = tiny_model("qwen3", dtype="bfloat16", layers=len(MIXED))
    config = mixed(*(make(8, 256)[0] for make in MIXED))
    folder = of_codes(model, tmp_path / "m", MIXED, config)
    assert len({*open_checkpoint(folder).rules.values()}) == len(MIXED) - 1
    assert_packed_alike(folder, dense, tp)


@pytest.mark.parametrize("format_name", SOME_SLOW)
def test_memory_is_that_of_the_stored_tensors(format_name, quantised):
    model = quantised("qwen3", format_name, hidden=512, intermediate=1024)
    stored = sum(
        tensor.nbytes
        for name, tensor in load_file(model / "model.safetensors").items()
        if "_proj." in name and not name.endswith("_shape")
    )
    sizes = []

    def look(engine):
        storages = {}
        for matrix in gc.get_objects():
            if type(matrix) is PackedMatrix:
                for part in (matrix.codes, matrix.scales, matrix.scale_rows, matrix.zeros):
                    if part is not None:
                        storage = part.untyped_storage()
                        storages[storage.data_ptr()] = storage.nbytes()
        sizes.append(sum(storages.values()))

    gc.collect()
    run(model, REQUESTS[1:], change=look, look=False, weights="packed")
    assert stored <= sizes[0] <= 1.03 * stored


@pytest.mark.slow
def test_a_flipped_code_scale_or_zero_point_changes_the_digest(tiny_model, tmp_path):
    make = next(make for make in MADE if make.__name__ == "w4a16_with_zero_points")
    model = tiny_model("qwen3", dtype="bfloat16")
    folder = of_codes(model, tmp_path / "m", [make], make()[0])
    prints = set()
    for suffix in ("", "weight_packed", "weight_scale", "weight_zero_point"):
        changed = tmp_path / f"changed-{suffix}"
        shutil.copytree(folder, changed)
        tensors = load_file(folder / "model.safetensors")
        if suffix:
            part = tensors[f"model.layers.1.mlp.down_proj.{suffix}"]
            part.view(-1)[3:4].view(dtype=part.view(-1).view(-1).dtype)
            flat = part.view(-1)
            flat[3] = flat[3] * 1.5 if part.is_floating_point() else flat[3] ^ 16
        save_file(tensors, changed / "model.safetensors")
        found = [
            run(changed, REQUESTS[1:], look=False, weights=weights).fingerprint
            for weights in ("packed", "dense")
        ]
        assert found[0] == found[1]
        prints.add(found[0])
    assert len(prints) == 4


def test_a_reload_keeps_weights_packed(quantised, dense):
    old, new = (quantised("qwen3", "int4-g128", seed=seed) for seed in (0, 1))
    other = quantised("qwen3", "mxfp4", seed=1)

    def refused(engine):
        with pytest.raises(ReloadError, match="has other quantised forms than the model"):
            engine.reload(str(other))

    waves = [refused, lambda engine: engine.reload(str(new)), [ask("n", PROMPT[:20], max_tokens=3)]]
    found = run(old, REQUESTS[:1], waves=waves, weights="packed")
    expected = dense(new)
    for position in range(19, 22):
        assert_same_bits(found.logits["n", 0, position], expected.logits["b", 0, position])


def test_tensors_that_are_sent_are_refused(quantised):
    def refused(engine):
        with pytest.raises(WeightUpdateError, match=r"weights are packed, .* --weights dense"):
            engine.weights.start_update()
        assert engine.weights.state == "whole"

    run(quantised("qwen3", "int4-g128"), [], change=refused, weights="packed")


@pytest.mark.parametrize(
    "format_name", ["int4-g128", pytest.param("mxfp4", marks=pytest.mark.slow)]
)
def test_random_weights_are_packed_ones(format_name, quantised):
    """A leaf of the last product has 48 columns: its groups are cut."""
    model = quantised("qwen3", format_name, heads=8, kv_heads=2)
    whole = run(model, REQUESTS, load_format="dummy", weights="dense")
    found = run(model, REQUESTS, load_format="dummy", weights="packed")
    assert found.fingerprint == whole.fingerprint
    for key, logits in whole.logits.items():
        assert_same_bits(found.logits[key], logits, str(key))


class TestRefusals:
    """Packed weights are refused by name where there are none, or nobody reads them."""

    def test_of_a_dense_model(self, tiny_model):
        with pytest.raises(UsageError, match="has no quantised weights in safetensors"):
            run(tiny_model(), REQUESTS, weights="packed")

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"approximate": True}, "weights packed has no approximate mode"),
            ({"on_slowdown": "approximate"}, "weights packed has no approximate mode"),
        ],
    )
    def test_with_settings_that_need_dense_ones(self, settings, message):
        with pytest.raises(UsageError, match=message):
            EngineConfig.from_values(model="m", weights="packed", **settings)


def test_the_log_says_which_weights_stay_packed(quantised, caplog):
    model = quantised("qwen3", "int4-g128")
    with caplog.at_level(logging.INFO, "tpdet.engine"):
        run(model, REQUESTS[1:], look=False)
        run(model, REQUESTS[1:], look=False, weights="packed")
    text = caplog.text
    assert "(packed int 4 bits, group 128) become bfloat16" in text and "--weights packed" in text
    assert "(packed int 4 bits, group 128) stay packed" in text


@pytest.mark.slow
def test_a_product_of_unlike_parts_becomes_numbers(tiny_model, dense, tmp_path):
    """Its parts are read into one weight, which has one form."""
    model = tiny_model("qwen3", dtype="bfloat16")
    folder = of_codes(model, tmp_path / "m", [fp8_channel], fp8_channel()[0])
    tensors = load_file(folder / "model.safetensors")
    stem = "model.layers.0.self_attn.k_proj"
    scale = tensors.pop(f"{stem}.weight_scale")
    tensors[f"{stem}.weight"] = (tensors[f"{stem}.weight"].float() * scale.float()).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    assert_packed_alike(folder, dense)
