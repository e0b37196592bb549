"""Matrices that stay packed: any cut, any order of rows, the bits of dequantisation, their size."""

from dataclasses import replace

import pytest
import torch

from tests.checkpoint.test_quantised import MADE, K, N, compressed_fp8_block, mxfp4, written
from tests.lib.bits import assert_same_bits
from tests.lib.kernels.ordered_numbers import ordered_numbers
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.pieces import Pieces, TensorRead, part_of
from tpdet.kernels.cpu.gemm.column import column_gemm
from tpdet.kernels.cpu.gemm.gated import gated_gemm
from tpdet.kernels.cpu.gemm.leaf import leaf_gemm
from tpdet.kernels.inputs.gated import GROUP, interleaved
from tpdet.kernels.inputs.ordering import ordered_weight, refusal
from tpdet.kernels.inputs.packed import (
    interleaved_rows,
    join_rows,
    pack,
    side_by_side,
    unpack_bytes,
)

CUTS = (
    (0, 0, N), (0, 70, 131), (0, 127, 129), (1, 0, K), (1, 48, 112), (1, 33, 34), (1, 101, 222)
)  # fmt: skip


def held(folder, dim, first, last, shape=(N, K), kept=None):
    """A cut, packed and as numbers in fp32."""
    extent = shape[dim]
    bounds = tuple((a, b) for a, b in ((0, first), (first, last), (last, extent)) if b > a)
    mine = bounds.index((first, last))
    pieces = Pieces(dim, bounds, range(mine, mine + 1), kept)
    checkpoint = open_checkpoint(folder)
    numbers = checkpoint.piece(part_of("a.weight", shape, dim, first, last)).contiguous()
    return checkpoint.packed(TensorRead("a.weight", shape, pieces)), numbers


def stored_bytes(matrix):
    """Bytes of memory that a matrix holds, whatever it shows of them."""
    parts = (matrix.codes, matrix.scales, matrix.scale_rows, matrix.zeros)
    return sum(part.untyped_storage().nbytes() for part in parts if part is not None)


@pytest.mark.parametrize("make", MADE)
def test_a_gpu_has_the_same_numbers_in_its_order_or_says_why_not(make, tmp_path):
    config, parts, _ = make()
    folder = written(tmp_path, config, parts)
    for dim, first, last in ((0, 0, N), (1, 128, 256)):
        packed, numbers = held(folder, dim, first, last)
        packed = replace(packed, dtype=torch.bfloat16)
        why = refusal(packed, [packed.shape[1]])
        if make.__name__ == "w8a16_with_zero_points":
            assert "zero points" in why
        else:
            assert not why, why
            weight = ordered_weight([packed])
            assert_same_bits(ordered_numbers(weight)[0], numbers.bfloat16(), f"{dim}")
            assert weight.nbytes <= 1.035 * 192 / N * packed.nbytes


@pytest.mark.parametrize("make", MADE)
def test_a_cut_has_the_bits_of_the_numbers_and_no_more_bytes(make, tmp_path):
    config, parts, expected = make()
    folder = written(tmp_path, config, parts)
    for dim, first, last in CUTS:
        packed, numbers = held(folder, dim, first, last)
        assert packed.shape == tuple(numbers.shape)
        assert_same_bits(packed.numbers().contiguous(), numbers)
        assert_same_bits(numbers, expected.float().narrow(dim, first, last - first).contiguous())
        assert_same_bits(packed[5:9].contiguous(), numbers[5:9])
        assert stored_bytes(packed) == packed.nbytes
    whole, _ = held(folder, 0, 0, N)
    names = [name for name in parts if name not in ("g_idx", "weight_shape")]
    scale_rows = 4 * N if "block" in make.__name__ else 0
    assert stored_bytes(whole) <= sum(parts[name].nbytes for name in names) + scale_rows


@pytest.mark.parametrize("make", MADE)
def test_rows_in_another_order_with_zeros_between_them(make, tmp_path):
    config, parts, _ = make()
    packed, numbers = held(written(tmp_path, config, parts), 1, 33, 187)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    order[::7] = -1
    moved = packed.with_rows(order)
    expected = torch.where(order[:, None] < 0, 0.0, numbers[order.clamp(min=0)])
    assert_same_bits(moved.numbers().contiguous(), expected)
    joined = join_rows([moved, packed, moved.cut(slice(5, 90), range(154)).compact()])
    expected = torch.cat([expected, numbers, expected[5:90]])
    assert_same_bits(joined.numbers().contiguous(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", MADE)
def test_products_have_the_bits_of_dense_weights(make, dtype, tmp_path):
    config, parts, _ = make()
    folder = written(tmp_path, config, parts)
    packed, numbers = held(folder, 0, 0, N)
    dense = numbers.to(dtype)
    packed = replace(packed, dtype=dtype)
    x = torch.randn(19, K, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert_same_bits(column_gemm(x, packed), column_gemm(x, dense))
    both = interleaved_rows(packed, packed)
    assert both.shape == (2 * (N + -N % GROUP), K)
    assert_same_bits(gated_gemm(x, both), gated_gemm(x, interleaved(dense, dense)))
    widths = (48, 33, 1, 174)  # leaves that end inside groups, and inside bytes
    leaves = side_by_side(packed, widths)
    assert_same_bits(leaf_gemm(x, leaves), leaf_gemm(x, dense[None], widths))


@pytest.mark.parametrize(("rows", "columns"), [(200, 176), (1, 257)])
def test_blocks_at_the_edges_stay_packed(rows, columns, tmp_path):
    config, parts, _ = compressed_fp8_block(rows, columns)
    folder = written(tmp_path, config, parts)
    for first, last in ((0, columns), (100, 150), (127, 129), (columns - 1, columns)):
        packed, numbers = held(folder, 1, first, last, (rows, columns))
        assert_same_bits(packed.numbers().contiguous(), numbers)


def test_of_a_piece_only_what_is_kept_is_held(tmp_path):
    config, parts, _ = mxfp4()
    checkpoint = open_checkpoint(written(tmp_path, config, parts))
    pieces = Pieces.whole(kept=range(17, 30))
    packed = checkpoint.packed(TensorRead("a.weight", (N, K), pieces))
    assert_same_bits(packed.numbers(), checkpoint.piece(part_of("a.weight", (N, K), 0, 17, 30)))
    assert stored_bytes(packed) == 13 * (K // 2 + K // 32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 2, 7])
def test_codes_are_packed_and_unpacked(bits, columns):
    codes = torch.randint(0, 1 << bits, (5, columns), generator=torch.Generator().manual_seed(3))
    packed = pack(codes, bits)
    assert packed.shape == (5, -(-columns * bits // 8))
    assert torch.equal(unpack_bytes(packed, bits)[:, :columns].long(), codes)
