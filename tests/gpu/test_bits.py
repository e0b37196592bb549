"""Bits and accuracy on a GPU: `pytest -m gpu tests/gpu [-k gemm] [--results docs/results]`.

Each check runs in a process, and ten at once, for most of the time goes into compiling: one that
hangs or loses the device fails alone. What several need compiled one of them compiles.
"""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.gpu.attention.bits import attention_checks
from tests.gpu.attention.decode import decode_checks
from tests.gpu.attention.fp8_pages import fp8_checks
from tests.gpu.attention.prefill import prefill_checks
from tests.gpu.attention.streamed import streamed_checks
from tests.gpu.engine.bits import engine_checks, make_models
from tests.gpu.engine.dependent import dependent_checks
from tests.gpu.engine.drafts_ahead import drafts_ahead_checks
from tests.gpu.engine.hybrids import hybrid_checks, make_hybrids
from tests.gpu.engine.interventions import intervention_checks
from tests.gpu.engine.weights import weight_checks
from tests.gpu.experts.bits import expert_checks
from tests.gpu.experts.packed import packed_expert_checks
from tests.gpu.gemm import column_bits, columns
from tests.gpu.gemm.leaf_bits import leaf_checks
from tests.gpu.gemm.norm_bits import norm_checks
from tests.gpu.gemm.packed import packed_checks
from tests.gpu.linear.bits import linear_checks
from tests.gpu.nn.invariant import invariant_checks
from tests.gpu.nn.log_prob import log_prob_checks
from tests.gpu.sampling.bits import sampler_checks

SUITES = {
    "dependent": lambda _: dependent_checks(),
    "columns": lambda _: columns.column_checks(),
    "prefill": lambda _: prefill_checks(),
    "decode": lambda _: decode_checks(),
    "streamed": lambda _: streamed_checks(),
    "fp8_pages": lambda _: fp8_checks(),
    "gemm": lambda _: [*column_bits.column_checks(), *leaf_checks(), *norm_checks()],
    "packed": lambda _: [*packed_checks(), *packed_expert_checks()],
    "attention": lambda _: attention_checks(),
    "experts": lambda _: expert_checks(),
    "linear": lambda _: linear_checks(),
    "sampler": lambda _: sampler_checks(),
    "weights": lambda _: weight_checks(),
    "invariant": lambda _: invariant_checks(),
    "log_prob": lambda _: log_prob_checks(),
    "engine": engine_checks,
    "hybrids": hybrid_checks,
    "drafts_ahead": drafts_ahead_checks,
    "interventions": intervention_checks,
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
        make_models(folder)
    if any(name.startswith("hybrids:") for name in chosen):
        make_hybrids(folder)
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("name", names(), ids=str)
def test_a_check_of_bits(rows_of, name):
    row = rows_of(name)
    assert row["equal"], row["error"]
