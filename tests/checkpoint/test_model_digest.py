"""The model digest names what may change bits, and nothing that may not."""

import dataclasses
import json
import shutil

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tpdet import LLM, SamplingParams
from tpdet.checkpoint.model_config import load_model_config
from tpdet.kernels.exact.rotary_tables import rotary_table
from tpdet.models.fingerprint import model_digest, table_digest

WEIGHTS = "ab" * 32
SAMPLED = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=2)


def answer(model, **settings):
    with_settings = {"kv_pages": 16, "skip_tokenizer_init": True} | settings
    llm = LLM(str(model), **with_settings)
    found = llm.generate([list(range(3, 40))], SAMPLED, use_tqdm=False)[0]
    llm.close()
    return found


def edited(model, folder, **fields):
    copy = shutil.copytree(model, folder)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return copy


def test_the_context_length_changes_neither_bits_nor_fingerprint_nor_replay_digest(
    tiny_model, tmp_path
):
    model = tiny_model("qwen3", kv_heads=2)
    shorter = edited(model, tmp_path / "shorter", max_position_embeddings=512)
    whole = answer(model)
    for found in (answer(model, max_model_len=64), answer(shorter)):
        assert found.outputs == whole.outputs
        assert found.system_fingerprint == whole.system_fingerprint
        assert found.replay_digest == whole.replay_digest


def test_another_base_of_the_rotary_embedding_changes_all_of_them(tiny_model, tmp_path):
    model = tiny_model("qwen3", kv_heads=2)
    other = edited(model, tmp_path / "other", rope_theta=12345.0)
    whole, found = answer(model), answer(other)
    assert found.system_fingerprint != whole.system_fingerprint
    assert found.replay_digest != whole.replay_digest
    assert found.outputs[0].logprob_bits != whole.outputs[0].logprob_bits


@pytest.fixture
def config(tiny_model):
    return load_model_config(tiny_model("llama", kv_heads=2))


@pytest.mark.parametrize(
    "change",
    [
        {"theta": 10001.0}, {"kind": "linear", "factor": 2.0},
        {"kind": "yarn", "factor": 4.0, "original_max_position": 1024},
        {"kind": "yarn", "factor": 4.0, "original_max_position": 1024, "attention_factor": 1.1},
    ],
)  # fmt: skip
def test_whatever_changes_a_rotary_table_changes_the_digest(config, change):
    other = dataclasses.replace(config, rotary=dataclasses.replace(config.rotary, **change))
    assert model_digest(other, WEIGHTS) != model_digest(config, WEIGHTS)
    tables = [rotary_table(c.rotary, 64) for c in (config, other)]
    assert table_digest(tables[0]) != table_digest(tables[1])


def test_each_field_but_the_context_and_the_weights_and_the_tables_version_are_in_it(
    config, monkeypatch
):
    digest = model_digest(config, WEIGHTS)
    longer = dataclasses.replace(config, max_position=2 * config.max_position)
    assert model_digest(longer, WEIGHTS) == digest
    changes = {"rms_norm_eps": 0.5, "eos_token_ids": (9,), "windows": (8,) * config.num_layers}
    found = [
        model_digest(dataclasses.replace(config, **{k: v}), WEIGHTS) for k, v in changes.items()
    ]
    found.append(model_digest(config, "cd" * 32))
    monkeypatch.setattr("tpdet.models.fingerprint.TABLE_VERSION", "rotary-table-2")
    found.append(model_digest(config, WEIGHTS))
    assert len({digest, *found}) == 6


def test_a_row_of_a_table_does_not_know_how_long_the_table_is(config):
    for short, long in zip(
        rotary_table(config.rotary, 100), rotary_table(config.rotary, 5000), strict=True
    ):
        assert_same_bits(short, long[:100], "rotary table")


def test_ranks_compare_the_tables_they_use(config):
    cos, sin = rotary_table(config.rotary, 300)
    nudged = cos.clone()
    nudged.view(torch.int32)[7, 3] ^= 1
    assert table_digest((cos, sin)) == table_digest((cos.clone(), sin))
    assert table_digest((nudged, sin)) != table_digest((cos, sin))
