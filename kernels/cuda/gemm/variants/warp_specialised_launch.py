"""The launches of the warp-specialised GEMM: row products folded inside a program, and columns."""

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.gemm.variants.leaf_fold import MIN_FOLD_STEPS
from tpdet.kernels.cuda.gemm.variants.root_form import RootForm
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.gemm.variants.variant import Fold, Operands, ProductShape, Variant
from tpdet.kernels.cuda.gemm.variants.warp_specialised import WarpForm, warp_specialised_fold
from tpdet.kernels.cuda.gemm.variants.warp_specialised_parts import (
    COLUMNS,
    REST,
    WIDE,
    warp_specialised_parts,
)
from tpdet.kernels.cuda.hardware import Gpu
from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.cuda.launch.warp_pipeline import CONSUMER_ROWS, tile_layout

_DEPTH = 64  # of a step: a row of a stage is then one swizzled line of 128 bytes
_BARRIERS = 1024  # bytes
_SUM_BYTES = 4  # of an fp32 sum
_ONE_LEAF = RootForm(1, 1, 1, 1)


def run_gluon_fold(operands: Operands, form: RootForm, tile: Tile, sms: int) -> None:
    """Values of 2 bytes; the roots of y [at least form.roots, M, N] fp32 are filled.

    Of the tile, its size (128 x 128 by 64) and the stages count. sms: programs at most. Raises
    ValueError where it does not fit (leaves of one step, for one).
    """
    x, k, gpu = operands.x, operands.w.shape[2], hardware.gpu_of(operands.x.device)
    if not folds(form, k, tile, gpu):
        raise ValueError(f"leaves of {k} by {tile} do not fit 'gluon': fold them otherwise")
    if sms < 1 or x.element_size() != 2:
        raise ValueError(f"'gluon' takes 2-byte values by descriptors: {x.dtype}, {sms} programs")
    room = slots_bytes(tile, operands.y.element_size()) <= gpu.shared_bytes
    # No tile reaches into the next root.
    apart = form.roots == 1 or x.shape[0] % CONSUMER_ROWS.value == 0
    _launch(operands, form, tile, sms, room and apart)


def run_gluon_column(operands: Operands, tile: Tile, sms: int) -> None:
    """One leaf and values of 2 bytes; y is filled.

    Raises ValueError for several leaves, another type, and a tile that does not fit.
    """
    x, w, _, y = operands[:4]
    (leaves, n, k), sizes = w.shape, {t.element_size() for t in (x, w, y)}
    shape = ProductShape(x.shape[0], n, k, leaves, 2, operands.gated > 0)
    if sizes != {2} or sms < 1 or not takes(shape, tile):
        raise ValueError(
            f"{tile} takes one leaf of 2-byte values, columns by eights and steps of {_DEPTH}: "
            f"{leaves} of {x.dtype} to {y.dtype}, {n} columns, K = {k}, {sms} programs: take "
            "another tile"
        )
    if slots_bytes(tile, shape.column_bytes) > hardware.gpu_of(x.device).shared_bytes:
        raise ValueError(f"{tile} takes more shared memory than there is: take another tile")
    if tile.columns == COLUMNS.value:
        _launch_parts(operands, tile, sms)
    else:
        _launch(operands, _ONE_LEAF, tile, sms, True)


def _launch_parts(operands: Operands, tile: Tile, sms: int) -> None:
    x, w, bias, y = operands[:4]
    (_, n, k), m, pair = w.shape, x.shape[0], operands.pair
    rows, depth, size = CONSUMER_ROWS.value, tile.depth, x.element_size()
    stage = tile_layout(depth * size, 8 * size)
    w_tiles, y_tiles = [], []
    for columns in (WIDE.value, REST.value):
        width = columns // pair
        slot = tile_layout(min(width * size, depth * size), 8 * size)
        w_tiles.append(TensorDescriptor.from_tensor(w.view(n, k), [columns, depth], stage))
        y_tiles.append(TensorDescriptor.from_tensor(y.view(m, n // pair), [rows, width], slot))
    warp_specialised_parts[(min(sms, cdiv(m, tile.rows) * cdiv(n, tile.columns)),)](
        TensorDescriptor.from_tensor(x, [rows, depth], stage),
        *w_tiles,
        *y_tiles,
        w if bias is None else bias,
        m,
        n,
        k // depth,
        FORM=_form(operands, _ONE_LEAF, tile),
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device, operands.turn),
    )


def _launch(operands: Operands, form: RootForm, tile: Tile, sms: int, sent: bool) -> None:
    """sent: tiles leave by the accelerator."""
    x, w, bias, y = operands[:4]
    (leaves, n, k), m, width = w.shape, x.shape[0], tile.columns // operands.pair
    rows, depth = CONSUMER_ROWS.value, tile.depth
    line = depth * x.element_size()  # bytes that are swizzled together
    stage = tile_layout(line, 8 * x.element_size())
    slot = tile_layout(line, 8 * y.element_size())
    blocks = form.roots * cdiv(m, tile.rows) * cdiv(n, tile.columns)
    warp_specialised_fold[(min(sms, blocks),)](
        TensorDescriptor.from_tensor(x, [rows, depth], stage),
        TensorDescriptor.from_tensor(w.view(leaves * n, k), [tile.columns, depth], stage),
        TensorDescriptor.from_tensor(y.view(-1, n // operands.pair), [rows, width], slot),
        y,
        w if bias is None else bias,
        m,
        n,
        form.roots,
        k // depth,
        FORM=_form(operands, form, tile, n % tile.columns == 0, sent),
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device, operands.turn),
    )


def _form(
    operands: Operands, form: RootForm, tile: Tile, even: bool = True, sent: bool = True
) -> WarpForm:
    bias, gated = operands.bias is not None, operands.gated
    return WarpForm(tile.columns, tile.depth, tile.stages, *form.shape, even, sent, bias, gated)


def folds(form: RootForm, k: int, tile: Tile, gpu: Gpu) -> bool:
    """Whether it folds leaves of width k of this form by this tile."""
    several = form.leaves > 1 and k // tile.depth >= MIN_FOLD_STEPS
    rests = form.parts == 2 and form.groups > 1  # the first terms rest in the slot of the tile
    room = slots_bytes(tile, _SUM_BYTES) if rests else stages_bytes(tile)
    return several and tile.columns == 128 and cut_for_it(k, tile) and room <= gpu.shared_bytes


def takes(shape: ProductShape, tile: Tile) -> bool:
    """Whether it computes a column product of this shape by this tile."""
    one = shape.leaves == 1 and shape.out_bytes == 2 and shape.n % (16 if shape.gated else 8) == 0
    return one and cut_for_it(shape.k, tile)


def cut_for_it(k: int, tile: Tile) -> bool:
    """Whether two warpgroups take this tile, for a chain of depth k."""
    steps = tile.depth == _DEPTH and k % tile.depth == 0
    plain = tile.variant in ("descriptor", "warp_specialised")
    return tile.rows == 128 and tile.columns in (128, COLUMNS.value, 256) and plain and steps


def stages_bytes(tile: Tile) -> int:
    """Shared memory of stages and barriers."""
    return tile.stage_bytes + _BARRIERS


def slots_bytes(tile: Tile, size: int) -> int:
    """The same with slots for a finished tile of values of `size` bytes."""
    return stages_bytes(tile) + tile.rows * tile.columns * size


WARP_SPECIALISED = Variant(
    "warp_specialised", "tma specialised", run_gluon_column, True, slots_bytes, takes
)
WARP_SPECIALISED_FOLD = Fold(
    "gluon", run_gluon_fold, folds, step_cost=0.75, leaf_cost=0.1, static_rows=257, wgmma=True
)
