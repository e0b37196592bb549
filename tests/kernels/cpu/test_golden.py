"""The golden vectors are what the contract id says they are, whatever torch does around them."""

import pytest
import torch

from tpdet.kernels import order
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.known import expert_golden, golden, linear_golden


def test_the_golden_vectors_have_the_digest_of_the_contract():
    assert golden.golden_digest() == order.GOLDEN_SHA256


def test_the_golden_vectors_do_not_depend_on_the_thread_count():
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert golden.golden_digest() == order.GOLDEN_SHA256
    finally:
        torch.set_num_threads(before)


def test_the_golden_vectors_of_experts_have_their_digest_and_one_order(monkeypatch):
    cpu = torch.device("cpu")
    assert expert_golden.expert_golden_digest(cpu) == expert_golden.EXPERT_GOLDEN_SHA256
    ids, logits = [], expert_golden.golden_logits()
    assert logits[4].isnan().any() and logits[3].isinf().any() and (logits[2] == 0.5).all()
    real = expert_golden.choose_experts

    def last_of_equal(*arguments):
        found = real(arguments[0].flip(1), *arguments[1:])
        ids.append(31 - found[0].flip(1))
        return ids[-1], *found[1:]

    monkeypatch.setattr(expert_golden, "choose_experts", last_of_equal)
    assert expert_golden.expert_golden_digest(cpu) != expert_golden.EXPERT_GOLDEN_SHA256
    assert ids[0][2].tolist() == [28, 29, 30, 31]


def test_the_golden_vectors_of_linear_layers_have_their_digest(monkeypatch):
    """And another one where the decays are a running product of rounded ones."""
    assert linear_golden.linear_golden_digest() == order.LINEAR_GOLDEN_SHA256
    real = linear_golden.decay_of

    def running(sums):
        steps = sums.diff(dim=0, prepend=torch.zeros_like(sums[:1]))
        return real(steps).cumprod(0)

    monkeypatch.setattr(linear_golden, "decay_of", running)
    assert linear_golden.linear_golden_digest() != order.LINEAR_GOLDEN_SHA256


def test_one_changed_bit_of_a_table_changes_the_digest(monkeypatch):
    real = golden.rotary_table

    def nudged(spec, positions):
        cos, sin = real(spec, positions)
        cos.view(torch.int32)[7, 3] ^= 1
        return cos, sin

    monkeypatch.setattr(golden, "rotary_table", nudged)
    assert golden.golden_digest() != order.GOLDEN_SHA256


@pytest.mark.parametrize("rounded", ["stream", "norm"])
def test_a_rounded_stream_or_a_wider_norm_changes_the_digest(monkeypatch, rounded):
    """Negative control of the stream's rows: h in the norm's dtype; y in fp32, as before."""
    real = golden.fold_and_norm

    def changed(sums, finish):
        (h, y), norm = real(sums, finish), finish.norm
        if rounded == "stream":
            return h.to(norm.dtype).float(), y
        wide = finish._replace(norm=Norm(norm.weight.float(), norm.eps))
        return h, real(sums, wide)[1].to(y.dtype)

    monkeypatch.setattr(golden, "fold_and_norm", changed)
    same = golden.golden_digest() == order.GOLDEN_SHA256
    assert same == (rounded == "norm"), "one rounding at the end is all that a norm's dtype is"


def test_the_hard_rows_are_hard():
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    tiny, large, near, wide, cancelling, zeros = golden.hard_rows(x)
    smallest = torch.finfo(torch.float32).tiny
    assert (tiny > 0).all() and (tiny < smallest).all() and tiny.amin() == 2.0**-149
    assert large.abs().sort().values[-2] < 10 and large.amax() > 2.9e38
    assert near.abs().unique().tolist() == [2.0**127]
    exponents = wide.abs().log2()
    assert exponents.amin() == -149 and exponents.amax() == 127
    assert (cancelling != 0).all() and (cancelling[0::2] + cancelling[1::2]).abs().amax() < 1e-6
    assert (zeros == 0).all() and set(zeros.signbit().tolist()) == {False, True}
