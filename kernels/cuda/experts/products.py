"""The two products of experts over groups of rows, by any tile: one bit class.

    gate_up   y[s] = round(act(gate, up)) of the expert of slot s; down   y[s] = round(chain + bias)

Each row has the bits of the dense product (`gemm/column.py`, `gemm/gated.py`) by its expert's
weight. A tile's rows are the slots of a block (`places.py`).
"""

import torch

from tpdet.kernels.cuda.experts.places import Places
from tpdet.kernels.cuda.experts.pointer import run_pointer
from tpdet.kernels.cuda.experts.warp_specialised_launch import run_warp_specialised, takes
from tpdet.kernels.cuda.gemm.variants.tile import K_GROUP, Tile
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.inputs.gated import GROUP

_POINTER_PROGRAMS = 4096  # before Hopper, and fp32: how many programs share the tiles


def grouped_product(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    places: Places,
    tile: Tile,
    sms: int,
    activation: str = "",
    shared: bool = False,
) -> torch.Tensor:
    """x [S, K], w [E, N, K], bias [E, N] or None -> y [S, N], gated [S, N / 2], in x's dtype.

    shared: x are the step's rows [M, K], and places are spread. activation: "" or the name of what
    joins gates and ups; then w and bias are interleaved. sms: multiprocessors to fill.
    Raises ValueError for operands or a tile that do not fit.
    """
    n, s, pair = w.shape[1], places.slot_count, 2 if activation else 1
    _check(x, w, bias, places, tile, activation, shared)
    y = x.new_empty(s, n // pair)
    if not y.numel():
        return y
    tiles = (places.blocks.shape[0] - 1) * cdiv(n, tile.columns)
    if tile.variant.startswith("pointer"):
        programs = min(tiles, _POINTER_PROGRAMS if not sms else sms * tile.ctas)
        run_pointer(x, w, bias, y, places.blocks, tile, programs, shared, activation)
    else:
        programs = min(tiles, sms * tile.ctas)
        run_warp_specialised(x, w, bias, y, places.blocks, tile, programs, shared, activation)
    return y


def _check(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    places: Places,
    tile: Tile,
    activation: str,
    shared: bool,
) -> None:
    (count, n, k), rows = w.shape, places.slot_count
    if x.dtype != w.dtype or not x.is_contiguous() or not w.is_contiguous():
        raise ValueError(f"x {x.dtype} and weights {w.dtype}: give contiguous ones of one dtype")
    if x.shape[1] != k or k % K_GROUP or k % tile.depth:
        raise ValueError(
            f"x {tuple(x.shape)}, weights {tuple(w.shape)}: {tile.depth} must divide K"
        )
    if x.shape[0] != rows and not (shared and places.spread and x.shape[0] <= tile.rows):
        raise ValueError(f"{x.shape[0]} rows of x do not fit {rows} slots in blocks of {tile.rows}")
    if tile.rows != places.height:
        raise ValueError(f"a tile of {tile.rows} rows does not fit blocks of {places.height} slots")
    if activation and (n % (2 * GROUP) or tile.columns % (2 * GROUP)):
        raise ValueError(
            f"{n} interleaved rows by {tile.columns}: they are eights of gates and ups"
        )
    if bias is not None and (bias.shape != (count, n) or not bias.is_contiguous()):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weights {tuple(w.shape)}")
    pointers = tile.variant.startswith("pointer")
    if not pointers and not takes(tile, n, k, x.element_size(), bool(activation)):
        raise ValueError(f"{tile} takes no weights {tuple(w.shape)} {w.dtype}: take another tile")
