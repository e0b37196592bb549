"""What packed weights take of a GPU, as `tpdet plan --packed` says it."""

import pytest

from tpdet.checkpoint.model_config.quantisation import Quantisation
from tpdet.models.footprint import packed_value_bytes
from tpdet.tools.plan.arguments import PACKED
from tpdet.tools.plan.command import find_model
from tpdet.tools.plan.memory import PACKED_FORMS
from tpdet.tools.plan.plan import PlanRequest, plan_size
from tpdet.tools.quantise.arguments import FORMATS


def test_the_formats_are_those_that_are_written():
    assert PACKED == FORMATS


def planned(name, packed):
    return plan_size(PlanRequest(name, find_model(name), "h200", 4096, 8, packed=packed), 1)


@pytest.mark.parametrize("format_name", PACKED)
def test_weights_are_those_of_the_codes_and_scales(format_name):
    dense, packed = (planned("qwen3-8b", name).memory for name in (None, format_name))
    products = 36 * 4096 * (6144 + 4096 + 3 * 12288)
    assert packed["weights"] - dense["weights"] == int(
        products * (packed_value_bytes(PACKED_FORMS[format_name]) - 2)
    )
    assert packed["unpacked weights"] == 24576 * 4096 * 2 and "unpacked weights" not in dense
    assert packed["left for KV"] > dense["left for KV"]


def test_a_70b_leaves_20_gb_of_cache_on_a_gpu_of_80_gb():
    memory = planned("llama-3-70b", "int4-g128").memory
    taken = memory["usable"] - memory["left for KV"]
    assert taken + 20e9 < 0.9 * 80e9


def test_experts_of_30b_in_int4_take_16_9_gb():
    dense, packed = (planned("qwen3-30b-a3b", name).memory for name in (None, "int4-g128"))
    assert dense["weights"] > 61e9 and packed["weights"] < 16.9e9


@pytest.mark.parametrize(
    ("form", "size"),
    [
        (Quantisation("awq", 4, 128, zero_points=True), 1 / 2 + 3 / 128),
        (Quantisation("fp8 channel", 8, 0), 1 + 2 / 128),
    ],
)
def test_a_value_has_its_share_of_scale_and_zero_point(form, size):
    assert packed_value_bytes(form) == size
