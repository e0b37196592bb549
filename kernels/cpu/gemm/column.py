"""Matrix products of the CPU path: one chain over K, in calls of one fixed row count.

    y[m, n] = sum over k of x[m, k] * w[n, k]        (fp32 products and sums)

Every call to the BLAS has 64 or 16 rows (the last ones zero where M is not a multiple of 16) and
256 columns: the last block reaches back into the one before it, and of a weight with fewer rows the
missing ones are zero. Operands are contiguous with a leading dimension fixed by the layer. So an
element's order of addition is that of one 16-row call over its K, whatever M, the shard of N or the
thread count. That 64 rows and 16 rows are one bit class, and that it does not matter where in a
block a column stands, is checked at start (`kernels/cpu/gemm/admission.py`). Blocks of other widths
would not do: from K = 896 on, MKL on an Ice Lake server gives blocks under 192 columns other bits.
bf16 and fp16 weights are widened block by block, packed ones unpacked: the products are exact, the
sums fp32.
"""

import torch

from tpdet.kernels.cpu import threads
from tpdet.kernels.inputs.ordered import OrderedWeight
from tpdet.kernels.inputs.packed import PackedStack, Weight, WeightStack

ROWS = 16
TALL_ROWS = 64  # of a call while as many are left: the BLAS is 1.4 times faster on them
COLUMNS = 256
_COSTLY = 1 << 22  # multiply-adds from which worker threads pay


def column_gemm(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    admitted: object = None,
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] in fp32, rounded once to out_dtype.

    out_dtype: x's if None. admitted: what a GPU's start-up check found (`admit_products`); it shows
    in time only.
    """
    y = chain(padded_rows(x), weight)[: x.shape[0]]
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype or x.dtype)


def padded_rows(x: torch.Tensor) -> torch.Tensor:
    """x in fp32 with zero rows up to a multiple of 16."""
    rows = -(-x.shape[0] // ROWS) * ROWS
    padded = torch.zeros(rows, x.shape[1], dtype=torch.float32)
    padded[: x.shape[0]] = x
    return padded


def of_cpu(weight: WeightStack) -> torch.Tensor | PackedStack:
    """The same weights. Raises TypeError for those in a GPU's order."""
    if isinstance(weight, OrderedWeight):
        raise TypeError("codes in a GPU's order have no product on a CPU")
    return weight


def chain(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [16 * R, K] fp32 contiguous, weight [N, K] -> [16 * R, N] fp32.

    Raises TypeError for a weight in a GPU's order.
    """
    if isinstance(weight, OrderedWeight):
        raise TypeError("codes in a GPU's order have no product on a CPU")
    height, width = weight.shape
    if height == COLUMNS and x.shape[0] in (ROWS, TALL_ROWS):  # one call is all
        return torch.mm(x, _whole_block(weight[0:height]).t())
    y = torch.empty(x.shape[0], height, dtype=torch.float32)

    def block(index: int) -> None:
        first = index * COLUMNS
        last = min(first + COLUMNS, height)
        begin = max(last - COLUMNS, 0)
        columns = _whole_block(weight[begin:last]).t()
        row = 0
        while row < x.shape[0]:
            end = row + (TALL_ROWS if x.shape[0] - row >= TALL_ROWS else ROWS)
            y[row:end, first:last] = torch.mm(x[row:end], columns)[:, first - begin : last - begin]
            row = end

    costly = x.shape[0] * height * width >= _COSTLY
    threads.run_pieces(-(-height // COLUMNS), block, costly)
    return y


def _whole_block(block: torch.Tensor) -> torch.Tensor:
    """Weight rows in fp32, contiguous, zero rows added up to a whole block."""
    wide = block.float().contiguous()
    if len(block) < COLUMNS:
        wide = torch.cat([wide, torch.zeros(COLUMNS - len(block), block.shape[1])])
    return wide
