"""A layer's experts on one rank: from a step's rows and their choice to the roots of its lanes.

Whole experts take one call, `expert_sums`. Experts that are cut over their outputs take two,
`expert_rows` and `sums_of_rows`, with a gather between: rows travel in the order of choices, for
positions differ from rank to rank.
"""

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.experts.gather import rows_in_blocks, rows_of_choices
from tpdet.kernels.cuda.experts.lanes import fold_lanes
from tpdet.kernels.cuda.experts.packed_tiles import PackedLayerTiles, packed_tile, packed_tiles
from tpdet.kernels.cuda.experts.products import grouped_product
from tpdet.kernels.cuda.experts.shared_lanes import fold_lanes_with_shared
from tpdet.kernels.cuda.experts.sorted_tokens import SortedTokens, sort_tokens
from tpdet.kernels.cuda.experts.tiles import layer_tiles, product_tile, programs, weight_of
from tpdet.kernels.cuda.gemm.choice.expert_entries import LayerTiles
from tpdet.kernels.cuda.gemm.packed.launch import PackedTile
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.inputs.experts import ExpertLayer, Lanes
from tpdet.kernels.inputs.ordered import OrderedWeight
from tpdet.kernels.inputs.shared_rows import SharedRows
from tpdet.kernels.partial_sums import PartialSums


def expert_sums(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | OrderedWeight,
    down: torch.Tensor | OrderedWeight,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    lanes: Lanes,
    shared: torch.Tensor | SharedRows | None = None,
    activation: str = "silu",
    tiles: LayerTiles | PackedLayerTiles | None = None,
    sorted_tokens: SortedTokens | None = None,
) -> PartialSums:
    """x [M, H], ids int32 and weights fp32 [M, k] -> the roots of this rank's lanes [R, M, H].

    gate_up [E, 2 * I, H] (interleaved) and down [E, H, I] of this rank's experts; biases
    [E, 2 * I] and [E, H] or None; shared: added to each lane last, fp32 [lanes, M, H] or not yet
    multiplied. tiles: override the choice; they show in time only. sorted_tokens: as the router
    left them.
    """
    sms, x = programs(x.device), x.contiguous()
    if tiles is None:
        (held, hidden, width), (tokens, chosen) = down.shape, ids.shape
        layer = ExpertLayer(hidden, width, held, lanes.total, chosen)
        if isinstance(gate_up, OrderedWeight):
            tiles = packed_tiles(layer, tokens)
        else:
            tiles = layer_tiles(layer, tokens, x.element_size(), x.device)
    if sorted_tokens is None or sorted_tokens[2:] != (tiles.gate_up.rows, tiles.by_token):
        sorted_tokens = sort_tokens(ids, lanes.experts, tiles.gate_up.rows, tiles.by_token)
    mixed = _gate_up(x, gate_up, biases[0], sorted_tokens, tiles.gate_up, sms, activation)
    y = grouped_product(mixed, down, biases[1], sorted_tokens, tiles.down, sms)
    return _fold(y, ids, weights, sorted_tokens, lanes, shared)


def expert_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor | OrderedWeight,
    bias: torch.Tensor | None,
    experts: range,
    total: int,
    activation: str = "silu",
) -> torch.Tensor:
    """x [M, H], ids [M, k] -> [M, k, I]: what each choice's expert makes of gate and up.

    gate_up [E, 2 * I, H], interleaved, of `experts` of `total`; a choice of none of them has +0.
    """
    sms = programs(x.device)
    tile, by_token = _tile(ids, total, gate_up, True)
    sorted_tokens = sort_tokens(ids, experts, tile.rows, by_token)
    mixed = _gate_up(x.contiguous(), gate_up, bias, sorted_tokens, tile, sms, activation)
    return rows_of_choices(mixed, sorted_tokens)


def sums_of_rows(
    mixed: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    down: torch.Tensor | OrderedWeight,
    bias: torch.Tensor | None,
    lanes: Lanes,
    shared: torch.Tensor | SharedRows | None = None,
) -> PartialSums:
    """mixed [M, k, I], ids and weights [M, k], down [E, N, I] -> the roots of lanes [R, M, N]."""
    sms = programs(mixed.device)
    tile, by_token = _tile(ids, lanes.total, down, False)
    sorted_tokens = sort_tokens(ids, lanes.experts, tile.rows, by_token)
    rows = rows_in_blocks(mixed.contiguous(), sorted_tokens)
    y = grouped_product(rows, down, bias, sorted_tokens, tile, sms)
    return _fold(y, ids, weights, sorted_tokens, lanes, shared)


def _fold(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    sorted_tokens: SortedTokens,
    lanes: Lanes,
    shared: torch.Tensor | SharedRows | None,
) -> PartialSums:
    if isinstance(shared, SharedRows):
        return fold_lanes_with_shared(y, ids, weights, sorted_tokens, lanes, shared)
    return fold_lanes(y, ids, weights, sorted_tokens, lanes, shared)


def _tile(
    ids: torch.Tensor, total: int, weights: torch.Tensor | OrderedWeight, gated: bool
) -> tuple[Tile | PackedTile, bool]:
    """The tile of one product alone, and whether blocks are by token."""
    tokens, mean = ids.shape[0], ids.numel() / total
    if isinstance(weights, OrderedWeight):
        return packed_tile(tokens, mean, weights.shape[2])
    return product_tile(tokens, mean, weight_of(weights, gated), hardware.gpu_of(ids.device))


def _gate_up(
    x: torch.Tensor,
    gate_up: torch.Tensor | OrderedWeight,
    bias: torch.Tensor | None,
    sorted_tokens: SortedTokens,
    tile: Tile | PackedTile,
    sms: int,
    activation: str,
) -> torch.Tensor:
    rows = x if sorted_tokens.by_token else rows_in_blocks(x, sorted_tokens)
    return grouped_product(
        rows, gate_up, bias, sorted_tokens, tile, sms, activation, sorted_tokens.by_token
    )
