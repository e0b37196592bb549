"""Operators as torch sees them: schemas, shapes, mutations, and the kernels' own bits."""

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tests.nn.operator_cases import HEAD, HEADS, KEY_HEADS, cases
from tpdet.kernels import ops
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.nn.operators import attention

QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = ("test_aot_dispatch_dynamic",)
CASES = {case.name: case for case in cases(dtype=torch.bfloat16)}


def trained(arguments):
    """Fractions have gradients, as parameters do."""
    return tuple(
        value.clone().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for value in arguments
    )


def paged_arguments():
    """Two sequences, the second with 5 positions stored before, on three of four pages."""
    draw = torch.Generator().manual_seed(2)
    heads = HEADS, KEY_HEADS, KEY_HEADS
    q, k, v = (torch.randn(262, n, HEAD, generator=draw).bfloat16() for n in heads)
    pages = [torch.randn(4, KEY_HEADS, 256, HEAD, generator=draw).bfloat16() for _ in "kv"]
    cos, sin = torch.randn(2, 300, HEAD // 2, generator=draw)
    where = [0, 5], [259, 3], [3, 1, 0]
    return (q, k, v, cos, sin, None, torch.ones(HEAD), 1e-6, *pages, *where), where


@pytest.mark.parametrize("name", CASES)
def test_schema_and_shapes_hold(name):
    case = CASES[name]
    torch.library.opcheck(case.operator, trained(case.arguments), test_utils=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_operators_are_traced_with_their_gradients(name):
    case = CASES[name]
    torch.library.opcheck(case.operator, trained(case.arguments), test_utils=TRACED)


def test_page_writes_are_mutations():
    arguments, where = paged_arguments()
    utils = (*QUICK, *TRACED)
    torch.library.opcheck(attention.rotate_and_store, arguments, test_utils=utils)
    mixed = arguments[0], *arguments[8:10], *where, None, 0.0, None
    torch.library.opcheck(attention.paged_attention, mixed, test_utils=utils)


def test_attention_over_pages_has_the_kernels_bits():
    arguments, where = paged_arguments()
    ours, theirs = ([page.clone() for page in arguments[8:10]] for _ in range(2))
    sequences = PagedSequence(0, 259, 0, (3, 1)), PagedSequence(259, 3, 5, (0,))
    batch = make_batch(sequences)
    q, k, v, cos, sin, query_norm, key_norm, eps = arguments[:8]
    turned = attention.rotate_and_store(*arguments[:8], *ours, *where)
    norms = query_norm, key_norm
    assert_same_bits(turned, ops.rotate_and_store(q, k, v, (cos, sin), norms, eps, theirs, batch))
    for one, other, before in zip(ours, theirs, arguments[8:10], strict=True):
        assert_same_bits(one, other)
        assert not torch.equal(one, before) and torch.equal(one[2], before[2])
    mixed = attention.paged_attention(turned, *ours, *where, 100, 0.0, None)
    assert_same_bits(mixed, ops.paged_attention(turned, *theirs, batch, 100))


def test_packed_attention_is_attention_over_pages():
    case = CASES["attention_window"]
    q, k, v, lengths, *seen = case.arguments
    packed = case.operator(*case.arguments)
    row = 0
    for length in lengths:
        part = slice(row, row + length)
        alone = case.operator(q[part], k[part], v[part], [length], *seen)
        assert_same_bits(packed[part], alone)
        row += length


def test_pages_that_do_not_fit_are_refused():
    arguments, _ = paged_arguments()
    with pytest.raises(ValueError, match="4 pages, and the sequences take 3"):
        attention.rotate_and_store(*arguments[:-1], [3, 1, 0, 2])
