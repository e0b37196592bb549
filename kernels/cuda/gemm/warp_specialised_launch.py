"""The launches of `gluon_leaf_gemm`: row products folded inside a program, and column products."""

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda.gemm.choice.root_form import (
    RootForm,
    fold_fits,
    places_bytes,
    trades_fit,
)
from tpdet.kernels.cuda.gemm.choice.variants import Variant
from tpdet.kernels.cuda.gemm.warp_specialised import ROWS, fold_by_trades
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.launch.dependent import dependent_launch


def run_gluon_fold(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, form: RootForm, variant: Variant, sms: int
) -> None:
    """x [M, L * K], w [L, N, K], both of 2 bytes -> y [at least form.roots, M, N] fp32, filled.

    Of the variant, the tile (128 x 128 by 64) and the stages count. sms: programs at most. Raises
    ValueError where it does not fit (leaves of one step, for one).
    """
    k = w.shape[2]
    if not fold_fits(form, k, variant, "gluon"):
        raise ValueError(f"leaves of {k} by {variant} do not fit 'gluon': fold them otherwise")
    if sms < 1 or x.element_size() != 2:
        raise ValueError(f"'gluon' takes 2-byte values by descriptors: {x.dtype}, {sms} programs")
    held = places_bytes(variant, y.element_size()) <= H200.shared_bytes
    apart = form.roots == 1 or x.shape[0] % ROWS.value == 0  # no tile reaches into the next root
    _launch(x, w, None, y, form, variant, sms, held and apart)


def run_gluon_column(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    variant: Variant,
    sms: int,
) -> None:
    """x [M, K], w [1, N, K], bias [N] or None -> y [1, M, N], filled; all values of 2 bytes.

    Raises ValueError for several leaves, another type, and a tile that does not fit.
    """
    (leaves, n, k), sizes = w.shape, {t.element_size() for t in (x, w, y)}
    if leaves != 1 or sizes != {2} or n % 8 or sms < 1:
        raise ValueError(
            f"{variant} takes one leaf of 2-byte values and columns by eights: {leaves} of "
            f"{x.dtype} to {y.dtype}, {n} columns, {sms} programs: take another tile"
        )
    if not trades_fit(k, variant) or places_bytes(variant, 2) > H200.shared_bytes:
        raise ValueError(f"{variant} has no room for K = {k}: take another tile")
    _launch(x, w, bias, y, RootForm(1, 1, 1, 1), variant, sms, True)


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    form: RootForm,
    variant: Variant,
    sms: int,
    sent: bool,
) -> None:
    (leaves, n, k), m = w.shape, x.shape[0]
    rows, columns, depth = ROWS.value, variant.columns, variant.depth
    ring = NVMMASharedLayout(2 * depth, 16, 2)
    place = NVMMASharedLayout(2 * depth, 8 * y.element_size(), 2)
    x_tiles = TensorDescriptor.from_tensor(x, [rows, depth], ring)
    w_tiles = TensorDescriptor.from_tensor(w.view(leaves * n, k), [columns, depth], ring)
    y_tiles = TensorDescriptor.from_tensor(y.view(-1, n), [rows, columns], place)
    blocks = form.roots * triton.cdiv(m, variant.rows) * triton.cdiv(n, columns)
    fold_by_trades[(min(sms, blocks),)](
        x_tiles,
        w_tiles,
        y_tiles,
        y,
        w if bias is None else bias,
        m,
        n,
        form.roots,
        k // depth,
        COLUMNS=columns,
        BK=depth,
        GROUPS=form.groups,
        PARTS=form.parts,
        PAIR=form.pair,
        EVEN=n % columns == 0,
        SENT=sent,
        HAS_BIAS=bias is not None,
        STAGES=variant.stages,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(x.device),
    )
