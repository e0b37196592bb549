"""Habits of vLLM's users: sizes, dtypes, arguments for what is always on; and "did you mean"."""

import pytest

from tpdet.arguments.suggestions import did_you_mean, nearest
from tpdet.arguments.vllm_arguments import HABITS, accept_habit, parse_size
from tpdet.config import EngineConfig
from tpdet.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [("2048", 2048), ("2k", 2000), ("2K", 2048), ("8K", 8192), ("25.6k", 25_600), ("1m", 10**6),
     ("1M", 2**20), (" 3g ", 3 * 10**9), ("1.005k", 1005), ("-1", -1)],
)  # fmt: skip
def test_sizes_are_vllms(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "2kk", "2x", "1.5K", "0.0001k", "1e3", "2 k", "٢k"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError):
        parse_size(text)


def test_a_fraction_of_1024_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"use 1\.5k"):
        parse_size("1.5K")


def test_an_engine_takes_short_names():
    found = EngineConfig.from_values(model="m", dtype="half", max_model_len="2k", kv_pages="1K")
    assert (found.dtype, found.max_model_len, found.kv_pages) == ("float16", 2000, 1024)
    short = {"bf16": "bfloat16", "float": "float32", "fp16": "float16", "fp32": "float32"}
    for name, long in short.items():
        assert EngineConfig.from_values(model="m", dtype=name).dtype == long
    with pytest.raises(UsageError, match="max_model_len"):
        EngineConfig.from_values(model="m", max_model_len="2x")


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("enable_chunked_prefill", True, "in pieces"),
        ("--trust-remote-code", "true", "no code of a model"),
        ("swap_space", 4, "swapped"),
        ("--generation-config", "vllm", "generation_config.json"),
        ("pipeline_parallel_size", 1, "by tensor_parallel_size only"),
        ("--pipeline-parallel-size", 1, "by --tp only"),
        ("cpu_offload_gb", 0, "weights"),
        ("quantization", None, "weights"),
        ("--chat-template-content-format", "auto", "one text"),
    ],
)
def test_what_is_done_anyway_is_accepted_with_a_sentence(name, value, word):
    found = accept_habit(name, value)
    assert found is not None and found.startswith(f"{name} changes nothing: ") and word in found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_chunked_prefill", False), ("generation_config", "auto"), ("enable_lora", True),
        ("quantization", "awq"), ("api_key", "sk-secret"), ("pipeline_parallel_size", 2),
        ("allowed_origins", '["*"]'), ("allow_credentials", True),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_without_its_value(name, value):
    with pytest.raises(UsageError, match=name) as caught:
        accept_habit(name, value)
    assert "sk-secret" not in str(caught.value)


def test_a_remedy_names_a_keyword_to_python_and_a_flag_to_a_shell():
    for spelled, remedy in ((None, "use transport=gather"), ("--d", "use --transport=gather")):
        with pytest.raises(UsageError) as caught:
            accept_habit("disable_custom_all_reduce", True, spelled)
        assert str(caught.value).endswith(f"cannot be honoured: {remedy}")


def test_an_argument_that_nobody_has_is_not_a_habit():
    assert accept_habit("max_moddel_len", 1) is None


def test_no_habit_hides_a_setting():
    assert not {name.replace("-", "_") for name in HABITS} & set(EngineConfig.model_fields)


def test_the_nearest_name_is_offered_and_nothing_far():
    known = ["temperature", "top_p", "max_model_len"]
    assert nearest("temprature", known) == "temperature"
    assert nearest("Max-Modle-Len", known) == "max_model_len"
    assert nearest("colour", known) is None
    assert did_you_mean("top-p", known) == ": did you mean 'top_p'?"
    assert did_you_mean("colour", known) == ""
