"""Matrix products of the GPU path: one fp32 chain over K, in groups of 16, ascending.

    column:  y[m, n] = round(sum over k of x[m, k] * w[n, k] + bias[n])
    leaf:    y[l, m, n] = sum over k of x[m, l * K + k] * w[l, n, k]         fp32
    fold:    y[slot, m, n] = a rank's subtree roots over its leaves          fp32

bf16 and fp16 run on tensor cores, fp32 by `ieee` fma. The kernel is chosen by
`gemm_variants`; all of them are one bit class, so the choice shows in time only.
"""

import torch

from tpdet.kernels.cuda.fold import fold_roots
from tpdet.kernels.cuda.gemm_descriptor import run_descriptor
from tpdet.kernels.cuda.gemm_fold import root_form, run_fold
from tpdet.kernels.cuda.gemm_pointer import run_pointer
from tpdet.kernels.cuda.gemm_variants import (
    FOLD_IN_PROGRAM,
    K_GROUP,
    Variant,
    column_variant,
    fold_variant,
    leaf_variant,
)
from tpdet.kernels.order import Expression
from tpdet.kernels.partial_sums import PartialSums

_DESCRIPTOR_CAPABILITY = (9, 0)
_DESCRIPTOR_BYTES = 16  # alignment of a base and of a row


def column_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    variant: Variant | None = None,
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] in fp32, rounded once to out_dtype.

    `variant` overrides the table (its tile depth must divide K). Raises ValueError when K is not a
    multiple of 16 or the operands differ in dtype.
    """
    x, w = _operands(x, weight.unsqueeze(0))
    (m, k), n = x.shape, w.shape[1]
    y = torch.empty(1, m, n, dtype=out_dtype, device=x.device)
    sms = _descriptor_sms(x, w, y)
    if variant is None:
        float32, wide_out = x.dtype == torch.float32, out_dtype == torch.float32
        variant = column_variant(m, n, k, float32=float32, wide_out=wide_out, sms=sms)
    _run(x, w, bias, y, variant, sms)
    return y[0]


def leaf_gemm(
    x: torch.Tensor, weight: torch.Tensor, variant: Variant | None = None
) -> torch.Tensor:
    """One fp32 chain a leaf: x [M, L * K], weight [L, N, K] -> partial sums [L, M, N] in fp32."""
    x, w = _operands(x, weight)
    m, (leaves, n, k) = x.shape[0], w.shape
    y = torch.empty(leaves, m, n, dtype=torch.float32, device=x.device)
    sms = _descriptor_sms(x, w, y)
    if variant is None:
        variant = leaf_variant(m, n, k, leaves, float32=x.dtype == torch.float32, sms=sms)
    _run(x, w, None, y, variant, sms)
    return y


def leaf_sums(
    x: torch.Tensor, weight: torch.Tensor, roots: tuple[Expression, ...]
) -> PartialSums:
    """x [M, L * K], weight [L, N, K] -> sums [C, M, N] fp32 of leaves or of whole roots.

    With few rows the leaves run in programs of their own and the reader folds them.
    """
    if x.shape[0] * weight.shape[0] > FOLD_IN_PROGRAM and x.dtype != torch.float32:
        folded = leaf_fold_gemm(x, weight, 0, roots, len(roots))
        return PartialSums(folded, tuple(range(len(roots))))
    return PartialSums(leaf_gemm(x, weight), roots)


def leaf_fold_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    first_leaf: int,
    roots: tuple[Expression, ...],
    slots: int,
    variant: Variant | None = None,
) -> torch.Tensor:
    """What a rank sends [slots, M, N] fp32, of x [M, L * K] and weight [L, N, K], L leaves from
    `first_leaf`.

    The bits of `fold_roots(leaf_gemm(x, weight), ...)`. With few rows it is that; with more the
    leaves of a tile are folded where they are made, if the device and the roots' form allow it.
    """
    x, w = _operands(x, weight)
    m, (leaves, n, k) = x.shape[0], w.shape
    form = root_form(first_leaf, leaves, roots)
    make = torch.empty if len(roots) == slots else torch.zeros
    y = make(slots, m, n, dtype=torch.float32, device=x.device)
    sms = _descriptor_sms(x, w, y)
    float32 = x.dtype == torch.float32
    if form is not None and form.leaves_alone:
        _run(x, w, None, y, leaf_variant(m, n, k, leaves, float32=float32, sms=sms), sms)
        return y
    many = m * leaves > FOLD_IN_PROGRAM or variant is not None
    if not many or form is None or float32 or not sms:
        return fold_roots(leaf_gemm(x, w), first_leaf, roots, slots)
    paired = form.pair * form.parts > 1
    chosen = variant or fold_variant(m, n, k, form.roots, paired=paired, sms=sms)
    if chosen is None:
        return fold_roots(leaf_gemm(x, w), first_leaf, roots, slots)
    _check_depth(chosen, w)
    run_fold(x, w, y, form, chosen, sms)
    return y


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    variant: Variant,
    sms: int,
) -> None:
    if y.numel() == 0:
        return
    _check_depth(variant, w)
    if variant.descriptor:
        run_descriptor(x, w, bias, y, variant, sms)
    else:
        run_pointer(x, w, bias, y, variant)


def _check_depth(variant: Variant, w: torch.Tensor) -> None:
    """A tile that crossed the end of a leaf's K would read its neighbour."""
    if w.shape[2] % variant.depth:
        raise ValueError(f"depth {variant.depth} does not divide K = {w.shape[2]}: use .at(K)")


def _operands(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x with contiguous rows and a contiguous weight [L, N, K]. Raises ValueError."""
    if x.dtype != w.dtype:
        raise ValueError(f"x is {x.dtype} and the weight {w.dtype}: give both one dtype")
    if x.shape[1] != w.shape[0] * w.shape[2] or w.shape[2] % K_GROUP:
        raise ValueError(
            f"x {tuple(x.shape)} does not fit a weight {tuple(w.shape)} whose reduced dimension "
            f"is a multiple of {K_GROUP}"
        )
    return (x if x.stride(1) == 1 else x.contiguous()), w.contiguous()


def _descriptor_sms(*tensors: torch.Tensor) -> int:
    """Multiprocessors of a device with tensor descriptors, 0 if these tensors cannot use them."""
    properties = torch.cuda.get_device_properties(tensors[0].device)
    if (properties.major, properties.minor) < _DESCRIPTOR_CAPABILITY:
        return 0
    for tensor in tensors:
        row = tensor.stride(-2) * tensor.element_size()
        if row % _DESCRIPTOR_BYTES or tensor.data_ptr() % _DESCRIPTOR_BYTES:
            return 0
    return properties.multi_processor_count
