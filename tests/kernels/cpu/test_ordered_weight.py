"""The order of packed weights on a GPU: every thread's words hold its own codes."""

from dataclasses import replace

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tests.lib.kernels.ordered_numbers import ordered_numbers
from tpdet.kernels.inputs.ordered import (
    E2M1,
    E4M3,
    INT4,
    INT4_OF_HALF,
    INT4_ZERO,
    INT4_ZERO_OF_HALF,
    INT8,
)
from tpdet.kernels.inputs.ordering import ordered_weight, refusal
from tpdet.kernels.inputs.packed import PackedMatrix, interleaved_rows, pack, side_by_side

FORMS = {
    "fp8 blocks": ("e4m3", 8, 128, torch.float32, E4M3),
    "int4": ("int", 4, 128, torch.bfloat16, INT4),
    "int4 of halves": ("int", 4, 64, torch.float16, INT4_OF_HALF),
    "mxfp4": ("e2m1", 4, 32, torch.uint8, E2M1),
    "int4 with zero points": ("int", 4, 128, torch.bfloat16, INT4_ZERO),
    "int4 of halves with zero points": ("int", 4, 32, torch.float16, INT4_ZERO_OF_HALF),
    "int8": ("int", 8, 128, torch.float32, INT8),
    "int8 by row": ("int", 8, 0, torch.bfloat16, INT8),
    "fp8 by row": ("e4m3", 8, 0, torch.float32, E4M3),
}


def drawn(form, n, k, seed=0):
    kind, bits, group, dtype, _ = FORMS[form]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k * bits // 8), generator=generator).to(torch.uint8)
    in_blocks = form == "fp8 blocks"
    blocks = -(-n // 128) if in_blocks else n
    if kind == "e4m3":
        codes = torch.where(codes & 127 == 127, codes - 1, codes)
    groups = -(-k // group) if group else 1
    scales = 1e-3 + torch.rand(blocks, groups, generator=generator)
    scales = (120 + 8 * scales).to(dtype) if dtype == torch.uint8 else scales.to(dtype)
    rows = (torch.arange(n) // 128).int() if in_blocks else None
    zero, zeros = (8 if bits == 4 else 128) if kind == "int" else 0, None
    if "zero points" in form:
        zero, zeros = 1, pack(torch.randint(0, 16, (n, groups), generator=generator), 4)
    return PackedMatrix(
        kind,
        bits,
        codes,
        range(k),
        scales,
        group,
        scale_rows=rows,
        zeros=zeros,
        zero=zero,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("form", FORMS)
class TestNumbers:
    """Numbers of an `OrderedWeight`, read as the kernels read them, are the matrix's."""

    def test_of_a_column_product(self, form):
        matrix = drawn(form, 200, 384)
        weight = ordered_weight([matrix])
        assert weight.recipe == FORMS[form][-1] and weight.shape == (1, 200, 384)
        assert weight.nbytes <= 1.03 * 256 / 200 * matrix.nbytes
        assert_same_bits(ordered_numbers(weight)[0], matrix[:], form)

    def test_of_gates_and_ups(self, form):
        both = interleaved_rows(drawn(form, 136, 256), drawn(form, 136, 256, 1))
        assert_same_bits(ordered_numbers(ordered_weight([both]))[0], both[:], form)

    def test_of_leaves(self, form):
        matrix = drawn(form, 64, 512)
        leaves = side_by_side(matrix, (256, 256)).matrices
        wanted = torch.stack([leaf[:] for leaf in leaves])
        assert_same_bits(ordered_numbers(ordered_weight(leaves)), wanted, form)

    def test_of_a_rank_that_begins_inside_a_matrix(self, form):
        part = drawn(form, 192, 512).cut(slice(64, 192), range(256, 512)).compact()
        assert_same_bits(ordered_numbers(ordered_weight([part]))[0], part[:], form)


def test_a_flipped_code_or_scale_is_another_number():
    matrix = drawn("int4", 64, 128)
    before = ordered_numbers(ordered_weight([matrix]))
    matrix.codes[17, 9] ^= 16
    codes = ordered_numbers(ordered_weight([matrix]))
    assert (codes != before).nonzero().tolist() == [[0, 17, 19]]
    matrix.scales[17, 0] *= 2
    assert len((ordered_numbers(ordered_weight([matrix])) != codes).nonzero().unique(dim=0)) > 100


@pytest.mark.parametrize(
    ("changed", "widths", "why"),
    [
        ({"dtype": torch.float16}, [128], "a model in float16"),
        ({"zero": 7}, [128], "4-bit int with scales in bfloat16"),
        ({"scales": torch.ones(8, 1)}, [128], "4-bit int with scales in float32"),
        ({"group": 16}, [128], "groups of 16 columns"),
        ({}, [128, 192], "chains of 192 columns, no multiple of 128"),
        ({}, [128, 512], ""),
    ],
)
def test_what_no_kernel_reads_is_named(changed, widths, why):
    assert refusal(replace(drawn("int4", 8, 128), **changed), widths) == why


def test_a_leaf_that_begins_inside_a_group_is_refused():
    matrix = drawn("int4", 64, 384)
    with pytest.raises(ValueError, match="begins inside a group"):
        ordered_weight([matrix.cut(slice(None), range(64, 192))])
