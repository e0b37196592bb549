"""Processed log-probabilities are log-softmax, in fp64, of what the filters leave."""

import math

import numpy as np
import pytest
import torch

from tpdet.kernels.inputs.row_params import RowParams
from tpdet.sampling.sampler import sample

V = 2003
WAYS = (
    {"temperature": 0.7},
    {"temperature": 1.7, "top_k": 40},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 100, "top_p": 0.7, "min_p": 0.01, "bias": {3: 4.0, 9: -2.0},
     "repetition_penalty": 1.3, "prompt_ids": (1, 2, 3), "frequency_penalty": 0.4,
     "presence_penalty": 0.2, "output_ids": (5, 5, 7), "forbidden": (11, 12)},
    {"temperature": 0.0, "bias": {3: 14.0}, "presence_penalty": 0.5, "output_ids": (5, 7)},
)  # fmt: skip


def log_softmax_of_what_is_left(logits, how):
    """By id, from the formulas of the contract in fp64: {id: log-probability}."""
    x = logits.double().numpy().copy()
    for token, bias in how.bias.items():
        x[token] += bias
    for token in {*how.prompt_ids, *how.output_ids} if how.repetition_penalty != 1.0 else ():
        x[token] = (
            x[token] / how.repetition_penalty
            if x[token] > 0
            else x[token] * (how.repetition_penalty)
        )
    for token in {*how.output_ids}:
        x[token] -= how.frequency_penalty * how.output_ids.count(token) + how.presence_penalty
    left = np.argsort(-x, kind="stable")
    left = left[~np.isin(left, how.forbidden)]
    if how.temperature != 0.0:
        x /= how.temperature
        left = left[: how.top_k] if how.top_k > 0 else left
        share = np.exp(x[left] - x[left[0]])
        before = np.cumsum(share) - share
        left = left[before < how.top_p * share.sum()]
        if how.min_p > 0.0:
            left = left[x[left] >= x[left[0]] + math.log(how.min_p)]
    mass = math.fsum(np.exp(x[left] - x[left[0]]))
    return {int(token): x[token] - x[left[0]] - math.log(mass) for token in left}


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_log_probability_is_that_of_fp64(way):
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(way)) * 3
    params = [RowParams(seed=i, position=9, **WAYS[way]) for i in range(6)]
    found = sample(logits, params, [20] * 6, processed=True)
    for row, how, answer in zip(logits, params, found, strict=True):
        truth = log_softmax_of_what_is_left(row, how)
        best = sorted(truth, key=lambda token: (-truth[token], token))[:20]
        assert [candidate.token_id for candidate in answer.top] == best
        shown = [(answer.token_id, answer.logprob), *((c.token_id, c.logprob) for c in answer.top)]
        for token, logprob in shown:
            assert logprob == pytest.approx(truth[token], abs=3e-6)
        raw = sample(row[None], [how], [0])[0]
        assert abs(raw.logprob - truth[answer.token_id]) > 1e-3  # the other mode is another number
