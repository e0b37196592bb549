"""Operators inside `tpdet.nn.invariant()` against PyTorch's own in float64; gradients are drawn."""

import pytest
import torch
from torch.nn import functional as F

from tests.nn.test_invariant_operators import BY_ROW, ROWS, WIDTH, attended, computed, draw, visible
from tpdet.nn import invariant

MOST_ERROR = 3e-6
"""The largest error of fp32 results and gradients, over the largest value of the reference."""
WITHOUT = {"topk", "experts"}
"""What has no float64 form, or whose choice a rounding may change."""


def error(found, reference):
    """The largest difference by the largest value."""
    return float((found.double() - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("name", sorted({*BY_ROW} - WITHOUT))
def test_results_and_gradients_are_those_of_float64(name):
    x, grad = draw(ROWS, WIDTH), draw(ROWS, 400, seed=1)
    with invariant():
        inside = computed(BY_ROW[name], x, grad)
    outside = computed(BY_ROW[name], x.double(), grad.double())
    for found, reference in zip(inside, outside, strict=True):
        assert found.dtype == torch.float32 and error(found, reference) < MOST_ERROR


def test_experts_are_products_by_each_rows_own_matrix():
    x, grad = draw(ROWS, WIDTH), draw(ROWS, 400, seed=1)
    with invariant():
        inside = computed(BY_ROW["experts"], x, grad)
    matrices = draw(2, WIDTH, 24, seed=5).double()
    own = lambda x: (x[:, None] @ matrices[(x[:, 0] > 0).long()])[:, 0]
    for found, reference in zip(inside, computed(own, x.double(), grad.double()), strict=True):
        assert error(found, reference) < MOST_ERROR


MASKS = {
    "causal": visible(40, 40, 0),
    "window": visible(40, 40, 0, 9),
    "padded": visible(25, 40, 11),
    "padded window": visible(30, 40, 0, 9),
    "short of its window": visible(9, 40, 0, 9),
    "all": torch.ones(40, 40, dtype=torch.bool),
    "what is to come": visible(40, 40, 0).t(),
    "two keys each": visible(40, 40, 0, 2).flip(0),
    "keys from the end": torch.ones(40, 40, dtype=torch.bool).tril().flip(1),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_and_its_gradients_are_those_of_float64(name):
    q, grad = (draw(2, 4, 40, 16, seed=seed) for seed in (0, 3))
    k, v = (draw(2, 2, 40, 16, seed=seed) for seed in (1, 2))
    mask = MASKS[name][None, None]
    grad = torch.where(mask[0, 0].any(1)[:, None], grad, 0.0)  # what a row sees none by is free
    with invariant():
        inside = attended(q, k, v, grad, attn_mask=mask)
    outside = attended(*(x.double() for x in (q, k, v, grad)), attn_mask=mask)
    for found, reference in zip(inside, outside, strict=True):
        assert error(found, reference) < MOST_ERROR


def parameter_gradients(dtype):
    """Gradients of a small network's parameters and of its embedded ids."""
    shapes = {"table": (11, 24), "factor": (24,), "shift": (24,), "wide": (40, 24), "bias": (40,)}
    parameters = {
        name: draw(*shape, seed=seed).to(dtype).requires_grad_()
        for seed, (name, shape) in enumerate(shapes.items())
    }
    p = parameters
    ids = torch.arange(60).view(3, 20) % 11
    x = F.layer_norm(F.embedding(ids, p["table"]), (24,), p["factor"], p["shift"])
    y = F.gelu(F.linear(x, p["wide"], p["bias"]), approximate="tanh")
    z = F.rms_norm(y @ p["wide"], (24,), p["factor"])
    F.cross_entropy(z.flatten(0, 1), ids.flatten(), ignore_index=3).backward()
    return [parameter.grad for parameter in parameters.values()]


def test_gradients_of_parameters_are_those_of_float64():
    with invariant():
        inside = parameter_gradients(torch.float32)
    for found, reference in zip(inside, parameter_gradients(torch.float64), strict=True):
        assert error(found, reference) < MOST_ERROR


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_sums_of_what_is_not_finite_are_those_of_ieee(special):
    x = draw(4, 9)
    x[1, 2] = special
    with invariant():
        total, p = x.sum(1), x.softmax(1)
    assert torch.equal(total.isnan(), x.sum(1).isnan())
    assert torch.equal(total.isinf() * total.sign(), x.sum(1).isinf() * x.sum(1).sign())
    assert torch.equal(p.isnan(), x.softmax(1).isnan())
