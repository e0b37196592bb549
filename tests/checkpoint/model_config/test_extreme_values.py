"""Every key of every family's config.json at values of every type and size.

A model is read with them, and what follows from its numbers is computed; or a key is named.
"""

import json
import re

import pytest

from tests.conftest import DATA_FAMILIES, FAMILIES, HYBRIDS
from tpdet.checkpoint.model_config import FAMILIES as KNOWN
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.fit import (
    check_modes,
    check_ranks,
    context_length,
    place_experts,
)
from tpdet.checkpoint.model_config.keys import INERT, NEUTRAL, PARSED
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.errors import TpdetError
from tpdet.kernels.exact.rotary_frequencies import attention_scaling, inverse_frequencies
from tpdet.tools.synthetic.make_model import make_model

VALUES = (
    0, -1, 1, 0.5, 1e308, -1e308, 5e-324, 1e-20, 1e20, 2**63, 10**400, True, False, None, "", "NaN",
    "text\nof lines", "x" * 5000, [], [1], ["a"], [[]], [1e308, -1], {}, {"a": 1},
)  # fmt: skip
SCALINGS = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": None,
     "truncate": True},
    {"rope_type": "longrope", "short_factor": [1.5] * 32, "long_factor": [2.0] * 32, "factor": 4.0,
     "original_max_position_embeddings": 64, "attention_factor": None},
)  # fmt: skip
LIKES = (*FAMILIES, *DATA_FAMILIES, *HYBRIDS, "olmo2")
BY_NAME = {family.name: family for family in KNOWN.values()}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that makes a directory with the configuration of a family and small weights."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    monkeypatch.setattr("tpdet.tools.synthetic.make_model.train_tokenizer", lambda *_: ids)

    def make(like):
        model = make_model(tmp_path / like, like=like, hidden=128, layers=2, vocab=1024)
        return model, json.loads((model / "config.json").read_text())

    return make


def read_all(model):
    """Everything that a start computes of a configuration before it reads weights."""
    config = load_model_config(model)
    read_stored_form(model)
    for spec in config.rotaries:
        if spec is not None:
            assert all(0 <= each < float("inf") for each in inverse_frequencies(spec))
            assert attention_scaling(spec) > 0
    scales = config.rms_norm_eps, config.embedding_scale, config.query_key_scale, config.logit_scale
    assert all(0 < each < 1e37 for each in scales), scales
    check_modes(config, "fold", False)
    check_ranks(config, 1, None)
    place_experts(config, 2, "auto")
    context_length(None, config)


def check(model, values, key, known):
    (model / "config.json").write_text(json.dumps(values))
    try:
        read_all(model)
    except TpdetError as error:
        message = str(error)
        assert error.exit_code in (2, 65) and len(message) <= 500 and "\n" not in message, message
        assert key in message or any(other in message for other in known), message
        return 1
    return 0


@pytest.mark.parametrize("like", LIKES)
def test_some_keys_at_some_values_are_read_or_named(like, made):
    sweep(made, like, 23)


@pytest.mark.slow
@pytest.mark.parametrize("like", LIKES)
def test_every_key_at_every_value_is_read_or_named(like, made):
    sweep(made, like, 1)


def sweep(made, like, step):
    model, config = made(like)
    family = BY_NAME[like]
    known = sorted(PARSED | family.parsed | {*NEUTRAL} | {*family.neutral})
    refused, number = 0, LIKES.index(like)
    for key in sorted({*config, *known} - INERT):
        for value in VALUES:
            number += 1
            if number % step == 0:
                refused += check(model, config | {key: value}, key, known)
    assert refused


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda each: each["rope_type"])
def test_numbers_of_a_scaling_are_read_or_named(scaling, made):
    sweep_scaling(made, scaling, VALUES[1::3])


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda each: each["rope_type"])
def test_every_number_of_a_scaling_is_read_or_named(scaling, made):
    sweep_scaling(made, scaling, VALUES)


def sweep_scaling(made, scaling, values):
    model, config = made("llama")
    config |= {"max_position_embeddings": 256, "rope_scaling": None}
    refused = 0
    for key in scaling:
        for value in values:
            changed = config | {"rope_scaling": scaling | {key: value}}
            refused += check(model, changed, key, ("rope_", "longrope", "a context of"))
    assert refused > len(values)


@pytest.mark.parametrize(
    ("like", "key", "value"),
    [
        ("phi3", "partial_rotary_factor", 1e308),
        ("glm4_moe", "partial_rotary_factor", 1e308),
        ("granite", "residual_multiplier", 1e308),
        ("granite", "residual_multiplier", 5e-324),
        ("gemma2", "attn_logit_softcapping", 1e308),
    ],
)
def test_a_number_that_is_finite_but_extreme_is_refused_by_name(like, key, value, made):
    model, config = made(like)
    (model / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(TpdetError, match=re.escape(f"{key} is {value}: its size must lie")):
        load_model_config(model)
    (model / "config.json").write_text(json.dumps(config))
    read_all(model)
