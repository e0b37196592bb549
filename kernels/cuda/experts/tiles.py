"""Which tiles of expert products run: by the rows of a step, tuned or by a static rule.

A tile's rows are those of a block. Where blocks are by token (few tokens), a block has a row for
every token of the step, and nothing is gathered. Both products of a layer have blocks of one size.
The GPU's shape table has the tiles of layers that `tpdet tune` has measured (`expert_entries.py`).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.experts.sorted_tokens import BY_TOKEN_ROWS
from tpdet.kernels.cuda.gemm.choice.expert_entries import LayerTiles
from tpdet.kernels.cuda.gemm.choice.shape_table import bucket_of, tuned_experts
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import ProductShape
from tpdet.kernels.cuda.hardware import NO_GPU, Gpu
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.inputs.experts import ExpertLayer
from tpdet.kernels.inputs.product import Product

# Mean rows of an expert up to which a tile was the fastest on an H200, for both products.
_FEW = Tile(8, 128, 64, 4, 6, "warp_swapped")
_SIXTEEN, _THIRTY_TWO = (Tile(r, 128, 64, 4, s, "warp_swapped") for r, s in ((16, 10), (32, 9)))
_HOPPER = (
    (8.0, _SIXTEEN),
    (24.0, _THIRTY_TWO),
    (48.0, Tile(64, 128, 64, 4, 7, "warp_swapped")),
    (float("inf"), Tile(128, 128, 64, 4, 5, "warp_swapped")),
)
_GATED = {
    _SIXTEEN: Tile(16, 64, 128, 4, 5, "pointer_swapped", ctas=2),
    _THIRTY_TWO: Tile(32, 64, 128, 4, 4, "pointer_swapped", ctas=2),
}
"""What is 1 to 2 % faster than a tile for gates and ups, where blocks are gathered."""
_POINTER = (
    (24.0, Tile(16, 64, 128, 4, 4, "pointer_swapped", ctas=2)),
    (96.0, Tile(64, 64, 128, 4, 4, "pointer_swapped")),
    (float("inf"), Tile(128, 128, 64, 8, 3, "pointer")),
)
_FLOAT32 = (
    (24.0, Tile(16, 64, 32, 4, 3, "pointer_swapped", ctas=2)),
    (float("inf"), Tile(64, 64, 32, 8, 3, "pointer", ctas=2)),
)


def programs(device: torch.device) -> int:
    """Multiprocessors of a GPU with the matrix instruction of a warpgroup, else 0."""
    return multiprocessors(device) if hardware.gpu_of(device).wgmma else 0


class ExpertWeight(NamedTuple):
    """One expert's [n, k] of values of `size` bytes; gated: its rows are gates and ups in turn."""

    n: int
    k: int
    size: int
    gated: bool

    def fits(self, tile: Tile, gpu: Gpu) -> bool:
        """Whether the tile's variant computes products of experts by it."""
        variant = variant_of(tile)
        shape = ProductShape(tile.rows, self.n, self.k, 1, self.size, self.gated)
        return variant.experts and variant.fits(shape, tile, gpu)


def weight_of(weights: torch.Tensor, gated: bool) -> ExpertWeight:
    """One expert's of weights [E, N, K]."""
    return ExpertWeight(weights.shape[1], weights.shape[2], weights.element_size(), gated)


def weights_of(layer: ExpertLayer, size: int) -> tuple[ExpertWeight, ExpertWeight]:
    """An expert's gates with ups, and its down."""
    gate_up = ExpertWeight(2 * layer.width, layer.hidden, size, True)
    return gate_up, ExpertWeight(layer.hidden, layer.width, size, False)


def layer_tiles(layer: ExpertLayer, tokens: int, size: int, device: torch.device) -> LayerTiles:
    """For steps of `tokens` rows, of values of `size` bytes. Raises as `load_table`."""
    if tuned := _tuned(layer, size, device):
        return tuned[bucket_of(tokens, tuned)]
    return static_tiles(layer, tokens, size, hardware.gpu_of(device))


def is_tuned(layer: ExpertLayer, size: int, device: torch.device) -> bool:
    """Whether the GPU's table has tiles for it. Raises as `load_table`."""
    return bool(_tuned(layer, size, device))


def _tuned(layer: ExpertLayer, size: int, device: torch.device) -> Mapping[int, LayerTiles]:
    """Tiles by tokens from the GPU's table; {} where it has none."""
    return {} if size != 2 else tuned_experts(hardware.gpu_of(device).name).get(layer, {})


def static_tiles(layer: ExpertLayer, tokens: int, size: int, gpu: Gpu) -> LayerTiles:
    """What runs without a table."""
    mean, (gate_up, down) = layer.mean_rows(tokens), weights_of(layer, size)
    up, by_token = product_tile(tokens, mean, gate_up, gpu)
    below, _ = product_tile(tokens, mean, down, gpu)
    if up.rows != below.rows:  # only one of them takes the fast form
        up, by_token = product_tile(tokens, mean, gate_up, NO_GPU)
        below, _ = product_tile(tokens, mean, down, NO_GPU)
    return LayerTiles(up, below, by_token)


def product_tile(tokens: int, mean: float, weight: ExpertWeight, gpu: Gpu) -> tuple[Tile, bool]:
    """The tile of one product, and whether blocks are by token; as `layer_tiles`."""
    by_token, small = tokens <= BY_TOKEN_ROWS[-1], weight.size == 2
    if gpu.wgmma and small:
        tile = next(tile for most, tile in _HOPPER if by_token or mean <= most)
        tile = _FEW if tokens <= _FEW.rows else tile
        if weight.fits(tile, gpu):
            other = _GATED.get(tile) if weight.gated and not by_token else None
            deep = other is not None and weight.k % other.depth == 0  # as many bytes on their way
            return (other if other is not None and deep else tile), by_token
    tile = next(tile for most, tile in (_POINTER if small else _FLOAT32) if mean <= most)
    return tile.at(weight.k), by_token and tokens <= tile.rows


def product_tiles(weight: ExpertWeight, gpu: Gpu) -> list[tuple[Tile, bool]]:
    """All that `product_tile` names for a weight, whatever the step."""
    means = [most for most, _ in (*_HOPPER, *_POINTER, *_FLOAT32)]
    steps = [(tokens, mean) for tokens in (1, *BY_TOKEN_ROWS, 1024) for mean in means]
    return list(dict.fromkeys(product_tile(*step, weight, gpu) for step in steps))


def tiles_in_use(
    products: Iterable[Product], layer: ExpertLayer | None, size: int, device: torch.device
) -> list[tuple[ExpertWeight, Tile, bool]]:
    """What steps of any length may run, with the weight and whether blocks are by token.

    products: those of one expert on this rank; layer: None where experts are cut over outputs.
    """
    if layer is not None and (tuned := _tuned(layer, size, device)):
        gate_up, down = weights_of(layer, size)
        found = [(gate_up, tiles.gate_up, tiles.by_token) for tiles in tuned.values()]
        return list(dict.fromkeys([*found, *((down, t.down, t.by_token) for t in tuned.values())]))
    weights = [ExpertWeight(each.n, each.k, size, each.gated) for each in products]
    gpu = hardware.gpu_of(device)
    return [(w, tile, by_token) for w in weights for tile, by_token in product_tiles(w, gpu)]
