"""Start-up check of the tiles that a model's experts will take: held against dense products.

Each tile runs on the kinds of data that the shape table's entries are tried on (fp16 does not hold
the heavy one), with a block that is full, one that is not, and an expert without rows. One that
differs from the dense product in one byte stops the start.
"""

from collections.abc import Iterable

import torch

from tpdet.kernels.cuda.experts.gather import rows_in_blocks
from tpdet.kernels.cuda.experts.products import grouped_product
from tpdet.kernels.cuda.experts.sorted_tokens import sort_tokens
from tpdet.kernels.cuda.experts.tiles import ExpertWeight, programs, tiles_in_use
from tpdet.kernels.cuda.gemm import trial_data
from tpdet.kernels.cuda.gemm.column import column_gemm
from tpdet.kernels.cuda.gemm.gated import gated_gemm
from tpdet.kernels.cuda.gemm.packed.launch import PackedTile
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.inputs.experts import ExpertLayer
from tpdet.kernels.inputs.ordered import OrderedWeight
from tpdet.kernels.inputs.product import Product

EXPERTS = 3
"""Experts that a trial has."""


def failing_tiles(
    products: Iterable[Product], layer: ExpertLayer | None, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """The tiles, as text, whose rows have other bytes than those of the dense product.

    products: those of one expert on this rank, without their leaves; layer: its whole experts, None
    where they are cut over outputs. Raises ValueError for a damaged table.
    """
    used = tiles_in_use(products, layer, dtype.itemsize, device)
    return [
        f"experts {weight.n}x{weight.k} {tile}"
        for weight, tile, by_token in used
        if differs(weight, tile, by_token, device, dtype)
    ]


def differs(
    weight: ExpertWeight, tile: Tile, by_token: bool, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether a tile's rows have other bytes than the dense product's on any kind of data."""
    kinds = [kind for kind in trial_data.KINDS if kind != "heavy" or dtype != torch.float16]
    n, k = weight.n, weight.k
    for kind in kinds:
        drawn = trial_data.trial_weight(kind, EXPERTS * n, k, device)
        weights = drawn.to(dtype).view(EXPERTS, n, k)
        if differs_for(kind, weights, weights, weight.gated, tile, by_token):
            return True
    return False


def differs_for(
    kind: str,
    weights: torch.Tensor | OrderedWeight,
    numbers: torch.Tensor,
    gated: bool,
    tile: Tile | PackedTile,
    by_token: bool,
) -> bool:
    """The same on one kind of data: weights of EXPERTS, beside dense products by their numbers.

    Expert 0 has more rows than a block where that can be, expert 1 none, expert 2 a few.
    """
    (_, _, k), device, dtype = numbers.shape, numbers.device, numbers.dtype
    name, tokens = "silu" if gated else "", tile.rows - 1 if by_token else tile.rows + 5
    x = trial_data.trial_rows(kind, tokens, k, device).to(dtype)
    ids = torch.tensor([0, 2], dtype=torch.int32, device=device).repeat(tokens, 1)
    ids[3:, 1] = -1
    found = sort_tokens(ids, range(EXPERTS), tile.rows, by_token)
    shared = by_token and gated  # down reads what gate and up have left in its rows
    rows = x if shared else rows_in_blocks(x, found)
    y = grouped_product(rows, weights, None, found, tile, programs(device), name, shared)
    differ = torch.zeros((), dtype=torch.bool, device=device)
    for choice, expert, count in ((0, 0, tokens), (1, 2, 3)):
        rows_of, dense = x[:count], numbers[expert]
        wanted = gated_gemm(rows_of, dense) if name else column_gemm(rows_of, dense, None, dtype)
        rows = y[found.positions[:count, choice].long()]
        whole = torch.int16 if dtype.itemsize == 2 else torch.int32
        differ |= (rows.view(whole) != wanted.view(whole)).any()
    return bool(differ)
