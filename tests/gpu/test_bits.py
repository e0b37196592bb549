"""Bits and accuracy on a GPU: `pytest -m gpu tests/gpu [-k gemm] [--results docs/results]`.

Each check runs in a process, and ten at once, for most of the time goes into compiling: one that
hangs or loses the device fails alone.
"""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.gpu import (
    attention_decode,
    attention_prefill,
    dependent,
    engine,
    experts,
    gemm_columns,
    sampler,
)
from tests.gpu.attention_bits import attention_checks
from tests.gpu.gemm import all_checks

SUITES = {
    "dependent": lambda _: dependent.dependent_checks(),
    "columns": lambda _: gemm_columns.column_checks(),
    "prefill": lambda _: attention_prefill.prefill_checks(),
    "decode": lambda _: attention_decode.decode_checks(),
    "gemm": lambda _: all_checks(),
    "attention": lambda _: attention_checks(),
    "experts": lambda _: experts.checks(),
    "sampler": lambda _: sampler.checks(),
    "engine": engine.engine_checks,
}
"""Each suite's checks, by the folder that holds the models of its checks."""


def names():
    """`suite: check`, of every check."""
    return [
        f"{name}: {check.name}" for name, suite in SUITES.items() for check in suite(Path("models"))
    ]


def prepare(folder, chosen):
    """`folder`, with the models of the chosen checks in it."""
    if any(name.startswith("engine:") for name in chosen):
        engine.make_models(folder)
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("name", names(), ids=str)
def test_a_check_of_bits(rows_of, name):
    row = rows_of(name)
    assert row["equal"], row["error"]
