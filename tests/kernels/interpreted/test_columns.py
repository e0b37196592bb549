"""The swapped descriptor kernel in Triton's interpreter, beside the pointer kernel."""

import torch

from tests.kernels.product_inputs import chain, draw
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels.cuda.gemm.variants.descriptor import run_descriptor
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands

REFERENCE = Tile(16, 16, 16, 4, 3)
SWAPPED = (
    Tile(8, 64, 32, 4, 6, "descriptor_swapped"),
    Tile(16, 64, 16, 4, 6, "descriptor_swapped"),
    Tile(32, 32, 32, 4, 4, "descriptor_swapped", ctas=2),
    Tile(64, 64, 16, 4, 4, "descriptor_swapped", halves=2),
)


def swapped(x, w, variant, bias=None, dtype=torch.float32):
    y = torch.full((w.shape[0], x.shape[0], w.shape[1]), torch.nan, dtype=dtype)
    run_descriptor(Operands(x, w, bias, y), variant, 3)
    return y


def test_swapped_tiles_have_the_bits_of_the_reference():
    for m, n in ((1, 48), (9, 64), (21, 144)):
        x, w = draw(m, 96, dtype=torch.float16, spread=True), draw(1, n, 96, dtype=torch.float16)
        bias = draw(n, dtype=torch.float16, seed=2)
        for shift in (None, bias):
            wanted = chain(x, w, REFERENCE, shift)
            for variant in SWAPPED:
                assert_same_bits(swapped(x, w, variant, shift), wanted, f"{m} {n} {variant}")


def test_several_leaves_stay_apart():
    x, w = draw(5, 2 * 64, dtype=torch.float16), draw(2, 48, 64, dtype=torch.float16, seed=1)
    wanted = chain(x, w, REFERENCE)
    for variant in SWAPPED:
        assert_same_bits(swapped(x, w, variant), wanted, f"{variant}")


def test_the_reference_shows_an_order():
    """Negative control: two chains added are not one chain."""
    x, w = draw(9, 96, dtype=torch.float16, spread=True), draw(1, 64, 96, dtype=torch.float16)
    halves = [
        chain(x[:, at : at + 48].contiguous(), w[..., at : at + 48].contiguous(), REFERENCE)
        for at in (0, 48)
    ]
    assert not same_bits(halves[0] + halves[1], swapped(x, w, SWAPPED[1]))
