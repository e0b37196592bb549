"""Operators and their gradients beside torch in float64, with random upstream gradients."""

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tests.nn.operator_cases import cases

CASES = {case.name: case for case in cases()}


def of_numbers(values):
    """The tensors of fractions among some values."""
    return [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]


def derived(function, arguments, upstream, dtype=None):
    """Outputs of fractions, and the gradients of all inputs of fractions; in dtype, or as given."""
    leaves = [
        value.detach().to(dtype or value.dtype).requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for value in arguments
    ]
    outputs = function(*leaves)
    outputs = of_numbers(outputs if isinstance(outputs, tuple) else (outputs,))
    gradients = [each.to(out) for each, out in zip(upstream, outputs, strict=True)]
    inputs = of_numbers(leaves)
    return outputs, torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)


def upstream_of(case):
    with torch.no_grad():
        outputs = case.operator(*case.arguments)
    draw = torch.Generator().manual_seed(5)
    outputs = of_numbers(outputs if isinstance(outputs, tuple) else (outputs,))
    return [torch.randn(out.shape, generator=draw) for out in outputs]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name):
    case = CASES[name]
    upstream = upstream_of(case)
    near = derived(case.operator, case.arguments, upstream)
    exact = derived(case.exact, case.arguments, upstream, torch.float64)
    for what, ours, theirs in zip(("value", "gradient"), near, exact, strict=True):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if other is None:  # a bias for the choice alone
                assert one is None
                continue
            error = (one.double() - other).abs().max() / other.abs().max()
            assert error < 5e-6, f"{what} {index}: {error:.1e}"


@pytest.mark.parametrize("name", ["columns", "rows", "attention", "experts", "embedding"])
def test_gradients_are_the_same_bits_again(name):
    case = CASES[name]
    upstream = upstream_of(case)
    first, second = (derived(case.operator, case.arguments, upstream)[1] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert_same_bits(one, other)


def test_a_wrong_gradient_would_be_seen():
    """The control: upstream gradients of one sign alone hide errors that others show."""
    case = CASES["log_probabilities_1.0"]
    upstream = upstream_of(case)
    near = derived(case.operator, case.arguments, upstream)[1][0]
    colder = (*case.arguments[:2], 1.001)
    exact = derived(case.exact, colder, upstream, torch.float64)[1][0]
    assert (near.double() - exact).abs().max() / exact.abs().max() > 1e-4
