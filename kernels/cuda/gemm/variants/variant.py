"""What a variant is: one object with a kernel, what the kernel takes, and what it costs.

Adding a variant: its kernel's file here, a line in `choice/variants.py`, its tiles in
`choice/candidate_tiles.json`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tpdet.kernels.cuda.gemm.variants.root_form import RootForm
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import Gpu
from tpdet.kernels.cuda.launch.dependent import ALONE
from tpdet.kernels.inputs.gated import GROUP

DESCRIPTOR_BYTES = 16
"""Alignment of a base and of a row of a tensor that a descriptor reaches."""
_BARRIER_BYTES = 2048  # beside the stages of a kernel that loads by descriptors


class Operands(NamedTuple):
    """What a product reads and fills: y[l] = round(x_l w_l^T + bias).

    x [M, L * K] with contiguous rows, w [L, N, K] contiguous, bias [N] or None, y [L, M, N].
    gated: the number of an activation (`inputs/activations.py`); above 0, w and bias are
    interleaved and y is [L, M, N / 2]. widths: of leaves of unequal K, whose w is [1, N, their
    sum]; else empty.

    Of experts, expert_ids int32 [1 + B] says how many blocks of rows there are and the expert of
    each (`experts/sorted_tokens.py`): w [E, N, K], bias [E, N], x [B * rows, K], y [B * rows, N].
    shared: every block reads the same rows, those of the step: x [M, K], M at most a tile's rows.
    turn: in a pair of products, or `ALONE` (`launch/dependent.py`).
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    y: torch.Tensor
    gated: int = 0
    widths: tuple[int, ...] = ()
    expert_ids: torch.Tensor | None = None
    shared: bool = False
    turn: int = ALONE

    @property
    def sizes(self) -> tuple[int, int]:
        """M and N."""
        return self.x.shape[0], self.w.shape[1]

    @property
    def pair(self) -> int:
        """Weight rows that give one value."""
        return 2 if self.gated else 1

    def expert_tiles(self, tile: Tile) -> int:
        """Tiles of all blocks that there could be."""
        assert self.expert_ids is not None
        return (self.expert_ids.shape[0] - 1) * -(-self.w.shape[1] // tile.columns)


class ProductShape(NamedTuple):
    """x [m, leaves * k] times weight [leaves, n, k], to values of `out_bytes` bytes.

    gated: pairs of weight rows give one value.
    """

    m: int
    n: int
    k: int
    leaves: int
    out_bytes: int
    gated: bool = False

    @property
    def column_bytes(self) -> int:
        """Bytes of output for a row of x and a row of the weight."""
        return self.out_bytes // 2 if self.gated else self.out_bytes


def stages_and_output(tile: Tile, size: int) -> int:
    """Shared memory of stages, barriers and a finished tile of values of `size` bytes."""
    return tile.stage_bytes + tile.rows * tile.columns * size // tile.halves + _BARRIER_BYTES


def stages_alone(tile: Tile, size: int) -> int:
    """Shared memory of a kernel whose threads store what they hold."""
    return tile.stage_bytes


@dataclass(frozen=True)
class Variant:
    """A kernel that adds up one chain for each value of a product.

    stored: the words that stand for it behind a tile in the shape table. run: fills the operands'
    y by a tile, on so many multiprocessors. descriptors: whether it loads by tensor descriptors.
    shared_bytes: of a tile and the bytes of a value. takes: which shapes and tiles it was written
    for. unequal: whether leaves may have unequal widths. dense, experts: whether it computes
    products without blocks of experts, and with them.
    """

    name: str
    stored: str
    run: Callable[[Operands, Tile, int], None]
    descriptors: bool = False
    shared_bytes: Callable[[Tile, int], int] = stages_and_output
    takes: Callable[[ProductShape, Tile], bool] = lambda shape, tile: True
    unequal: bool = False
    dense: bool = True
    experts: bool = False

    def fits(self, shape: ProductShape, tile: Tile, gpu: Gpu) -> bool:
        """Whether it can compute the shape by the tile in the shared memory of a program."""
        room = self.held_bytes(shape.column_bytes, tile, gpu) <= gpu.shared_bytes
        pairs = not shape.gated or tile.columns % (2 * GROUP) == 0
        aligned = not self.descriptors or shape.n * shape.column_bytes % DESCRIPTOR_BYTES == 0
        whole = shape.k % tile.depth == 0
        return room and pairs and aligned and whole and self.takes(shape, tile)

    def held_bytes(self, size: int, tile: Tile, gpu: Gpu) -> int:
        """Shared memory of a program on a GPU; size: bytes of a value.

        The matrix instruction of a warpgroup reads a stage where it lies. Before, Triton loads a
        stage into registers first, and one fewer is held.
        """
        held = self.shared_bytes(tile, size)
        return held if gpu.wgmma or self.descriptors else held - tile.stage_bytes // tile.stages


@dataclass(frozen=True)
class Fold:
    """A kernel that folds subtrees of one form over its leaves: y[r] = fold of x_l w_l^T.

    name: as in the shape table. run: fills y [form.roots or more, M, N] fp32. fits: whether it
    folds leaves of width k of a form by a tile on a GPU. step_cost: time of a step of K over that
    of a chain alone; leaf_cost: microseconds at the end of a leaf of the largest tile. static_rows:
    fewer rows take it from the shape table only. wgmma: whether it calls the matrix instruction of
    a warpgroup by name.
    """

    name: str
    run: Callable[[Operands, RootForm, Tile, int], None]
    fits: Callable[[RootForm, int, Tile, Gpu], bool]
    step_cost: float
    leaf_cost: float
    static_rows: int = 1
    wgmma: bool = False
