"""Numbers of a GPU's packed weight, word by word, where the matrix instruction has its rows."""

import torch

from tpdet.kernels.inputs.ordered import E2M1, E4M3, INT8, UNIT
from tpdet.kernels.inputs.packed import code_table

_LOW = 0xFFFFFFFF


def ordered_numbers(weight):
    """[L, N, K] in bf16, by the layout that `kernels/inputs/ordered.py` describes."""
    leaves, n, k = weight.shape
    scales = _of_columns(weight, weight.scales, weight.scale_rows)
    if weight.recipe == E2M1:
        scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    codes = _codes(weight).view(leaves, -1, k)[:, :n]
    if weight.recipe == E4M3:
        return (codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * scales.float()).bfloat16()
    if weight.recipe == INT8:
        return ((codes.float() - 128.0) * scales.float()).bfloat16()
    if weight.zeros is not None:
        zeros = _of_columns(weight, weight.zeros, 1)
        return ((codes.float() - zeros.float()) * scales.float()).bfloat16()
    table = code_table("e2m1" if weight.recipe == E2M1 else "int", 4, 8)
    numbers = table.view(torch.float32).view(256, 2)[:16, 0]
    return (numbers[codes] * scales.float()).bfloat16()


def _of_columns(weight, of_groups, rows):
    """[L, N, K]: of each number what its group has, one value for so many rows."""
    by_row = of_groups.repeat_interleave(rows, 2)[:, :, : weight.shape[1]]
    return by_row.repeat_interleave(weight.group, 1).transpose(1, 2)


def _codes(weight):
    """[L * blocks * 64, K]: for each thread and each of its words, the codes in it."""
    blocks, k, bits = len(weight.codes), weight.shape[2], weight.bits
    per_pass, per_word = 2048 // bits // 8, 32 // bits
    words = weight.codes.view(blocks, -1, 4, 8, 4, 4).long() & _LOW
    found = torch.zeros(blocks, UNIT, k, dtype=torch.int64)
    for at in range(words.shape[1]):
        for word in range(4):
            second, later = word & 1, word >> 1
            for t in range(4):
                column = at * per_pass + later * per_pass // 2 + 2 * t
                own = words[:, at, :, :, t, word]  # [blocks, w, g]
                for number in range(per_word):
                    if bits == 8:
                        i, step = number % 2, number // 2
                    else:
                        i, step = number // 4, number % 4
                    codes = own >> bits * number & (1 << bits) - 1
                    rows = found.view(blocks, 4, 2, 8, k)[:, :, second]
                    rows[..., column + 8 * step + i] = codes
    return found.flatten(0, 1)
