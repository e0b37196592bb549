"""The golden vectors are what the contract id says they are, whatever torch does around them."""

import torch

from tpdet.kernels import order
from tpdet.kernels.known import golden


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


def test_one_changed_bit_of_a_table_changes_the_digest(monkeypatch):
    real = golden.rotary_table

    def nudged(spec, positions):
        cos, sin = real(spec, positions)
        cos.view(torch.int32)[7, 3] ^= 1
        return cos, sin

    monkeypatch.setattr(golden, "rotary_table", nudged)
    assert golden.golden_digest() != order.GOLDEN_SHA256
