"""Start-up check of the CPU bit classes: what the kernels rely on is tried on this machine.

The kernels assume that the BLAS gives one element the same bits in both row blocks they use and
anywhere in a block of columns, and that exp does not depend on where in an array an element lies.
Both are properties of a library on a processor, so both are tested here before a model is served,
on the very shapes of the model; a failure names the shape.
"""

from collections.abc import Iterable

import torch

from tpdet.kernels.cpu.gemm.column import COLUMNS, ROWS, TALL_ROWS
from tpdet.kernels.inputs.linear_state import BLOCK_ROWS
from tpdet.kernels.order import CHUNK_TOKENS, K_GROUP, PAGE_TOKENS, TILE_TOKENS

_SEED = 20_240_607
_FIRST_COLUMNS = (0, 1, 16, 40, 99, 128, 200, 255, 256)  # where blocks begin


def check_bit_classes(reduced: Iterable[int], head_dim: int) -> None:
    """Raise RuntimeError when a BLAS or exp variant leaves its bit class.

    reduced: every K of the model's products (whole for column layers, a leaf's for row layers).
    """
    generator = torch.Generator().manual_seed(_SEED)
    for k in sorted({*reduced}):
        _check_columns(k, generator)
    _check_attention(head_dim, generator)
    _check_exp(generator)


def _check_columns(k: int, generator: torch.Generator) -> None:
    """Calls of 16 and 64 rows are equal, a column anywhere in its block, whatever is beside it."""
    spread = torch.randn(1, k, generator=generator).exp()
    x = torch.randn(TALL_ROWS, k, generator=generator) * spread
    weight = torch.randn(2 * COLUMNS, k, generator=generator)
    whole = torch.cat([torch.mm(x[:ROWS], half.t()) for half in weight.split(COLUMNS)], dim=1)
    for rows in (ROWS, TALL_ROWS):
        for first in _FIRST_COLUMNS:
            part = torch.mm(x[:rows], weight[first : first + COLUMNS].t())[:ROWS]
            if not torch.equal(part, whole[:, first : first + COLUMNS]):
                raise RuntimeError(
                    f"this BLAS gives other bits for {rows} rows and columns from {first} on than "
                    f"for {ROWS} rows and whole blocks at K={k}: the CPU path cannot keep its "
                    "promise on this machine"
                )
        few = torch.zeros(COLUMNS, k)
        few[: COLUMNS // 4] = weight[: COLUMNS // 4]
        part = torch.mm(x[:rows], few.t())[:ROWS, : COLUMNS // 4]
        if not torch.equal(part, whole[:, : COLUMNS // 4]):
            raise RuntimeError(f"this BLAS lets a column's neighbours change its bits at K={k}")
    alone = torch.zeros(ROWS, k)
    alone[3] = x[3]
    if not torch.equal(torch.mm(alone, weight[:COLUMNS].t())[3], whole[3, :COLUMNS]):
        raise RuntimeError(f"this BLAS lets a row's neighbours change its bits at K={k}")


def _check_attention(head_dim: int, generator: torch.Generator) -> None:
    """Batched products of 16 rows equal those of up to 256 rows, alone or in a batch."""
    head_dim += -head_dim % K_GROUP  # as attention pads heads
    shapes = ((head_dim, PAGE_TOKENS), (TILE_TOKENS, head_dim))
    for k, n in shapes:
        x = torch.randn(3, 256, k, generator=generator)
        y = torch.randn(3, n, k, generator=generator).transpose(1, 2)
        if k == TILE_TOKENS:
            y = y.contiguous()
        whole = torch.bmm(x, y)
        for rows in range(ROWS, 256, ROWS):
            for batch in (1, 3):
                part = torch.bmm(x[:batch, :rows].contiguous(), y[:batch])
                if not torch.equal(part, whole[:batch, :rows]):
                    raise RuntimeError(
                        f"this BLAS gives other bits for {rows} rows of {k}x{n} than for 256: "
                        "the CPU path cannot keep its promise on this machine"
                    )


def check_linear_products(key_size: int, value_size: int) -> None:
    """Raise RuntimeError when a batched product of linear layers depends on the batch.

    Their rows stand in blocks of 16 and 32, whatever a step has (`cpu/linear/delta_rule.py`).
    """
    generator = torch.Generator().manual_seed(_SEED)
    both = 2 * BLOCK_ROWS
    for rows, k, n in (
        (both, key_size, CHUNK_TOKENS),
        (both, key_size, value_size),
        (both, CHUNK_TOKENS, value_size),
        (BLOCK_ROWS, BLOCK_ROWS, value_size),
        (key_size, CHUNK_TOKENS, value_size),
    ):
        x = torch.randn(5, rows, k, generator=generator)
        y = torch.randn(5, k, n, generator=generator)
        whole = torch.bmm(x, y)
        for first, last in ((0, 1), (4, 5), (1, 4)):
            if not torch.equal(torch.bmm(x[first:last], y[first:last]), whole[first:last]):
                raise RuntimeError(
                    f"this BLAS gives other bits for {last - first} products of {rows}x{k}x{n} "
                    "than for 5: the CPU path cannot keep its promise on this machine"
                )
        alone = torch.zeros(1, rows, k)
        alone[0, 3] = x[0, 3]
        if not torch.equal(torch.bmm(alone, y[:1])[0, 3], whole[0, 3]):
            raise RuntimeError(
                f"this BLAS lets a row's neighbours change its bits in {rows}x{k}x{n}"
            )


def _check_exp(generator: torch.Generator) -> None:
    """exp gives the same bits wherever in an array a value lies."""
    x = -20 * torch.rand(4096, generator=generator)
    whole = torch.exp(x)
    for first in (0, 1, 3, 8, 15, 31):
        for count in (1, 2, 7, 8, 15, 16, 17, 33, 250):
            if not torch.equal(torch.exp(x[first : first + count].clone()), whole[first:][:count]):
                raise RuntimeError(
                    f"exp of {count} values differs from exp of 4096: the CPU path cannot keep its "
                    "promise on this machine"
                )
