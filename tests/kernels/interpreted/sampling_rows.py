"""Rows of logits and ways to sample from them, for the tests of the kernels that sample."""

import pytest
import torch

from tpdet.kernels.inputs.row_params import RowParams

V = 9001  # more than one part, and a part cut short
WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.6, "min_p": 0.2, "repetition_penalty": 1.3, "prompt_ids": (1, 2, 3, 8999),
     "output_ids": (5, 5, 7), "frequency_penalty": 0.5, "presence_penalty": 0.1},
    {"temperature": 0.0, "bias": {7: 90.0, 8: 90.0}, "forbidden": (7,)},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 2.0, "top_k": 5000, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 1, "bias": {8000: 40.0}},
    {"temperature": 1e-3, "top_k": V + 7, "top_p": 0.5},
    {"temperature": 50.0, "top_k": V - 1},
    {"temperature": 1.0, "top_p": 0.999, "min_p": 1.0},
)  # fmt: skip


def params(count, first=0):
    return [
        RowParams(
            seed=i * 0x9E3779B97F4A7C15 % 2**64,
            position=40 + i,
            choice=i % 3,
            **WAYS[(i + first) % len(WAYS)],
        )
        for i in range(count)
    ]


def rows(kind, count=12, vocabulary=V):
    x = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(7))
    if kind == "random":
        x = x * 3
    if kind == "tied":
        x = torch.round(x * 2)
    if kind == "flat":
        x = x * 1e-3
    if kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    if kind == "peaked":
        x[:, 17] += 60
    if kind == "holes":
        x[:, ::3] = -torch.inf
        x[:, 5:9] = 4.0
    if kind == "huge":
        x = x * 5e37
    return x


QUICK = "tied"  # the kind of `make test`; the others are for `make test-long`
KINDS = ("random", QUICK, "zeros", "peaked", "holes", "huge")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


of_each_kind = pytest.mark.parametrize(
    "kind", [QUICK, *(slow(kind) for kind in KINDS if kind != QUICK)]
)
