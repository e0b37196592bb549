"""An operation takes on a GPU what its declaration, the CPU's function, takes."""

import inspect
from importlib import import_module

import pytest

pytest.importorskip("triton")

from tpdet.kernels import ops

OPERATIONS = [each.__wrapped__ for each in vars(ops).values() if hasattr(each, "__wrapped__")]


def test_a_gpu_takes_what_is_declared():
    assert len(OPERATIONS) > 20
    for declared in OPERATIONS:
        if not declared.__module__.startswith("tpdet.kernels.cpu."):
            continue
        module = import_module(declared.__module__.replace(".cpu.", ".cuda."))
        wanted = inspect.signature(declared).parameters
        found = inspect.signature(getattr(module, declared.__name__)).parameters
        places = [name for name, each in wanted.items() if each.kind != each.KEYWORD_ONLY]
        assert [*found][: len(places)] == places, declared.__name__
        for name, each in wanted.items():
            assert found[name].default == each.default, f"{declared.__name__}: {name}"
