"""Widths that only the CPU path has are refused on a GPU before anything is read."""

import json

import pytest

from tests.checkpoint.model_config.test_model_config import LLAMA
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.fit import check_widths, model_leaves
from tpdet.errors import UsageError

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
NAMES = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}


def load(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"head_dim": 4}, "heads of 4: a GPU has kernels for 64, 96, 128, 256, run it"),
        (LLAMA | {"hidden_size": 24}, "hidden size 24: a GPU's kernels need a multiple of 16"),
        (LLAMA | {"intermediate_size": 37}, "intermediate size 37: a GPU's kernels need"),
        (
            LLAMA | NAMES | EXPERTS,
            "experts' width 24: a GPU's kernels need a multiple of 16, run it with --device cpu",
        ),
    ],
)
def test_a_gpu_refuses_what_its_kernels_do_not_have(tmp_path, config, message):
    model = load(tmp_path, config)
    check_widths(model, "cpu")
    with pytest.raises(UsageError, match=message):
        check_widths(model, "cuda")
    check_widths(load(tmp_path, LLAMA), "cuda")


def test_leaves_cover_every_width_and_are_blocks_of_16_where_it_divides(tmp_path):
    for width in (4, 8, 16, 37, 48, 100, 1024):
        cut = model_leaves(load(tmp_path, LLAMA | {"intermediate_size": width}), None).down
        assert cut.edges[0] == 0 and cut.edges[-1] == width
        assert width % 16 or all(edge % 16 == 0 for edge in cut.edges)
