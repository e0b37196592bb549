"""Where `tpdet.nn.invariant()` holds: in this thread, until the `with` ends; what it refuses."""

import subprocess
import sys
from threading import Thread

import pytest
import torch
from torch.nn import functional as F

from tests.lib.bits import same_bits
from tests.lib.tree import ROOT
from tests.nn.test_invariant_operators import draw
from tpdet.errors import UsageError
from tpdet.nn import invariant

X, WEIGHT = draw(301, 97), draw(303, 97, seed=1)


def stock():
    return F.linear(X[:3], WEIGHT), torch.sigmoid(X[:, :95]), F.softmax(X, -1)


def all_same(left, right):
    return all(map(same_bits, left, right))


def in_a_thread(work):
    results = []
    thread = Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_stock_bits_return_after_the_with_after_errors_and_in_other_threads():
    before = stock()
    with invariant():
        inside = stock()
        assert all_same(in_a_thread(stock), before)
        with invariant():
            assert all_same(stock(), inside)
        assert all_same(stock(), inside)
    assert all_same(stock(), before)
    with pytest.raises(KeyError), invariant():
        raise KeyError
    assert all_same(stock(), before)
    assert not any(map(same_bits, inside, before)), "take a shape on which they differ"


def test_another_thread_may_be_inside_alone():
    before = stock()

    def inside():
        with invariant():
            return stock()

    assert not any(map(same_bits, in_a_thread(inside), before))
    assert all_same(stock(), before)


def test_only_this_thread_has_one_thread_for_an_operator():
    code = """
import torch
from threading import Thread
from tpdet.nn import invariant
torch.set_num_threads(3)
def count(found):
    found.append(torch.get_num_threads())
def of_new_thread():
    found = []
    thread = Thread(target=count, args=(found,))
    thread.start()
    thread.join()
    return found[0]
with invariant():
    assert (torch.get_num_threads(), of_new_thread()) == (1, 3)
    with invariant():
        assert (torch.get_num_threads(), of_new_thread()) == (1, 3)
    assert (torch.get_num_threads(), of_new_thread()) == (1, 3)
assert (torch.get_num_threads(), of_new_thread()) == (3, 3)
import sys
assert "torch._dynamo" not in sys.modules, "a compiler is imported for nothing"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_backward_inside_is_invariant_and_outside_is_stock():
    def gradient(x, inside):
        leaf = x.clone().requires_grad_()
        with invariant():
            y = F.linear(leaf, WEIGHT)
            if inside:
                y.backward(draw(*y.shape, seed=2)[: len(x)])
        if not inside:
            y.backward(draw(*y.shape, seed=2)[: len(x)])
        return leaf.grad

    grad = draw(301, 303, seed=2)
    assert same_bits(gradient(X, False), torch.mm(grad, WEIGHT))
    with invariant():
        expected = torch.mm(grad, WEIGHT)
    assert same_bits(gradient(X, True), expected)


REFUSED = [
    (lambda: torch.linalg.inv(X[:97]), r"aten\.linalg_inv_ex\.default .*outside"),
    (lambda: F.dropout(X, 0.5), r"aten\.(native_dropout|bernoulli_)\..*eval"),
    (lambda: X[0].softmax(0).multinomial(1), r"aten\.multinomial\.default .*outside"),
    (lambda: X.var(0), r"aten\.var\.correction .*outside"),
    (lambda: torch.add(X, X, alpha=2), r"aten\.add\.Tensor with alpha 2: multiply"),
    (lambda: X.double().sum(), r"aten\.sum\.default of torch\.float64: use float32"),
    (lambda: X.double() @ WEIGHT.double().t(), r"aten\.mm\.default of torch\.float64"),
    (lambda: X // 2, r"aten\.floor_divide\.default of floating values"),
    (lambda: attend(dropout_p=0.1), r"dropout 0\.1: call model\.eval"),
    (lambda: attend(scale=0.3), r"scale 0\.3: heads of 16"),
    (lambda: attend(attn_mask=draw(5, 5)), "adds to scores: give a boolean mask"),
    (lambda: attend(attn_mask=torch.tensor([1, 0, 1, 1, 1]).bool().expand(5, 5)), "has gaps"),
    (lambda: attend(attn_mask=(draw(1, 2, 5, 5) > 9) | ladder()), "differs between heads"),
    (lambda: attend(attn_mask=ladder(), is_causal=True), "give one of them"),
]


def ladder():
    """A causal mask of the first head, and of the second one without its last row."""
    mask = torch.ones(5, 5).tril().bool().repeat(1, 2, 1, 1)
    mask[0, 1, 4] = False
    return mask


def attend(**named):
    x = draw(1, 2, 5, 16)
    return F.scaled_dot_product_attention(x, x, x, **named)


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_not_admitted_is_refused_with_its_name_and_the_remedy(call, message):
    with invariant(), pytest.raises(UsageError, match=message):
        call()


def test_attention_that_reaches_pytorch_is_refused():
    """Code that calls a kernel of attention past the function has no other arithmetic."""
    x = draw(1, 2, 5, 16)
    with invariant(), pytest.raises(UsageError, match="_scaled_dot_product_flash_attention"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)
