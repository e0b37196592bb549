"""The two products of experts over blocks of rows, by any tile: one bit class.

    gate_up   y[p] = round(act(gate, up)) of the expert of row p; down   y[p] = round(chain + bias)

Each row has the bits of the dense product (`gemm/column.py`, `gemm/gated.py`) by its expert's
weight. A tile's rows are those of a block (`sorted_tokens.py`).
"""

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.experts.sorted_tokens import SortedTokens
from tpdet.kernels.cuda.experts.tiles import ExpertWeight
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.packed.launch import ONE_LEAF, PackedTile, RowBlocks, run_packed
from tpdet.kernels.cuda.gemm.variants.tile import K_GROUP, Tile
from tpdet.kernels.cuda.gemm.variants.variant import Operands
from tpdet.kernels.inputs.activations import EXPERT_ACTIVATIONS
from tpdet.kernels.inputs.gated import GROUP
from tpdet.kernels.inputs.ordered import OrderedWeight


def grouped_product(
    x: torch.Tensor,
    w: torch.Tensor | OrderedWeight,
    bias: torch.Tensor | None,
    sorted_tokens: SortedTokens,
    tile: Tile | PackedTile,
    sms: int,
    activation: str = "",
    shared: bool = False,
) -> torch.Tensor:
    """x [P, K], w [E, N, K], bias [E, N] or None -> y [P, N], gated [P, N / 2], in x's dtype.

    shared: x are the step's rows [M, K], and blocks are by token. activation: "" or the name of
    what joins gates and ups; then w and bias are interleaved. tile: a `PackedTile` of codes and
    scales. sms: multiprocessors to fill. Raises ValueError for operands or a tile that do not fit.
    """
    gated = EXPERT_ACTIVATIONS[activation] if activation else 0
    y = x.new_empty(sorted_tokens.rows, w.shape[1] // (2 if gated else 1))
    _check_rows(x, w.shape, bias, sorted_tokens, tile.rows, shared)
    if isinstance(w, OrderedWeight):
        if not isinstance(tile, PackedTile) or x.dtype != torch.bfloat16:
            raise ValueError(f"{tile} and x {x.dtype}: packed weights take tiles and rows of bf16")
        if y.numel():
            blocks = RowBlocks(sorted_tokens.expert_ids, shared)
            run_packed(x, w, bias, y[None], tile, gated, ONE_LEAF, blocks)
        return y
    if isinstance(tile, PackedTile):
        raise ValueError(f"{tile} takes packed weights alone: take another tile")
    operands = Operands(x, w, bias, y, gated, (), sorted_tokens.expert_ids, shared)
    _check(operands, tile)
    if y.numel():
        variant_of(tile).run(operands, tile, sms)
    return y


def _check_rows(
    x: torch.Tensor,
    shape: tuple[int, ...],
    bias: torch.Tensor | None,
    sorted_tokens: SortedTokens,
    tile_rows: int,
    shared: bool,
) -> None:
    (count, n, k), rows = shape, sorted_tokens.rows
    if not x.is_contiguous() or x.shape[1] != k:
        raise ValueError(f"x {tuple(x.shape)} and weights {tuple(shape)}: give contiguous rows")
    step = shared and sorted_tokens.by_token and x.shape[0] <= tile_rows
    if x.shape[0] != rows and not step:
        raise ValueError(f"{x.shape[0]} rows of x do not fit {rows} rows in blocks of {tile_rows}")
    if tile_rows != sorted_tokens.block_rows:
        raise ValueError(
            f"a tile of {tile_rows} rows does not fit blocks of {sorted_tokens.block_rows} rows"
        )
    if bias is not None and (bias.shape != (count, n) or not bias.is_contiguous()):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weights {tuple(shape)}")


def _check(operands: Operands, tile: Tile) -> None:
    x, w = operands[:2]
    _, n, k = w.shape
    if x.dtype != w.dtype or not w.is_contiguous():
        raise ValueError(f"x {x.dtype} and weights {w.dtype}: give contiguous ones of one dtype")
    if k % K_GROUP or k % tile.depth:
        raise ValueError(
            f"x {tuple(x.shape)}, weights {tuple(w.shape)}: {tile.depth} must divide K"
        )
    if operands.gated and (n % (2 * GROUP) or tile.columns % (2 * GROUP)):
        raise ValueError(
            f"{n} interleaved rows by {tile.columns}: they are eights of gates and ups"
        )
    if not ExpertWeight(n, k, x.element_size(), operands.gated > 0).fits(
        tile, hardware.gpu_of(x.device)
    ):
        raise ValueError(f"{tile} takes no weights {tuple(w.shape)} {w.dtype}: take another tile")
