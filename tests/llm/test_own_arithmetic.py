"""Bits of `LLM` do not depend on what the program around it has set of torch."""

from contextlib import ExitStack, contextmanager

import pytest
import torch

from tpdet import LLM, SamplingParams
from tpdet.comm.agreement import collect_facts
from tpdet.errors import UsageError

SETTINGS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "double": lambda: default_type(torch.float64),
    "half": lambda: default_type(torch.bfloat16),
    "device": lambda: torch.device("meta"),
}


@contextmanager
def default_type(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def small_numbers_are_zero():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def in_force():
    kind = torch.get_default_device().type
    return kind, torch.get_default_dtype(), torch.is_autocast_enabled("cpu")


FIRST = ("cpu", torch.float32, False)


def answered(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
    (output,) = llm.generate("The for statement", params, use_tqdm=False)
    choice = output.outputs[0]
    return choice.logprob_bits, choice.token_ids, output.system_fingerprint


@pytest.fixture(scope="module")
def directory(tiny_model):
    return str(tiny_model("qwen3"))


@pytest.fixture(scope="module")
def llm(directory):
    with LLM(directory, kv_pages=8) as model:
        yield model


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_around_a_call_change_nothing(llm, name):
    expected = answered(llm)
    with SETTINGS[name]():
        there = in_force()
        assert there != FIRST
        assert answered(llm) == expected
        assert in_force() == there


def test_settings_around_a_start_change_nothing(llm, directory):
    with ExitStack() as stack:
        for setting in SETTINGS.values():
            stack.enter_context(setting())
        with LLM(directory, kv_pages=8) as other:
            found = answered(other)
    assert found == answered(llm)


def test_a_thread_without_the_smallest_numbers_is_refused(llm, directory):
    expected = answered(llm)
    with small_numbers_are_zero():
        for call in (lambda: answered(llm), lambda: LLM(directory, kv_pages=8)):
            with pytest.raises(UsageError, match=r"call torch\.set_flush_denormal\(False\)"):
                call()
    assert answered(llm) == expected


def test_contradictory_precisions_of_torch_are_a_fact_like_others(monkeypatch):
    def contradictory():
        raise RuntimeError("use only the new API")

    fact = "float32 matmul precision"
    assert collect_facts({})[fact] == "highest"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", contradictory)
    assert len(collect_facts({})[fact].split()) == 2
