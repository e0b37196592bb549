"""Variables that put other arithmetic in place are refused at start, each by its name."""

import pytest

from tpdet.comm.arithmetic_environment import VARIABLES, check_environment
from tpdet.config import EngineConfig
from tpdet.errors import UsageError
from tpdet.runner.start import load_model as start

REFUSED = [variable.name for variable in VARIABLES if variable.refused_on]


def test_the_table_names_each_variable_once_with_what_it_does():
    names = [variable.name for variable in VARIABLES]
    assert len(names) == len({*names}) and all(variable.effect for variable in VARIABLES)
    assert {variable.refused_on for variable in VARIABLES} == {"", "cuda"}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_variable_its_value_and_the_remedy(name):
    with pytest.raises(UsageError, match=rf"^{name} is '/a/b', which .*; unset it$") as found:
        check_environment("cuda", {name: "/a/b"})
    assert found.value.exit_code == 2
    check_environment("cpu", {name: "/a/b"})  # nothing of it is used there


@pytest.mark.parametrize("value", ["", "0", "False", "OFF", " no "])
def test_what_asks_for_nothing_is_taken(value):
    check_environment("cuda", dict.fromkeys(REFUSED, value))
    with pytest.raises(UsageError, match="NVIDIA_TF32_OVERRIDE is '1'"):
        check_environment("cuda", dict.fromkeys(REFUSED, value) | {"NVIDIA_TF32_OVERRIDE": "1"})


@pytest.mark.parametrize("variable", [v for v in VARIABLES if not v.refused_on], ids=lambda v: v[0])
def test_what_shows_in_the_fingerprint_is_taken(variable):
    for device in ("cpu", "cuda"):
        check_environment(device, {variable.name: "1"})


def test_a_start_in_a_callers_own_process_looks_too(monkeypatch):
    """`LLM(...)`, whose environment its caller set: before a GPU is touched."""
    monkeypatch.setattr(start, "resolve_device", lambda wanted: "cuda")
    monkeypatch.setenv("TRITON_KERNEL_OVERRIDE", "1")
    with pytest.raises(UsageError, match="TRITON_KERNEL_OVERRIDE is '1'"):
        start.load_model(EngineConfig(model="none"), None, None)
