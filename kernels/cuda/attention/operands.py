"""What attention's kernels are given: flat records, as Triton takes them, made once a call."""

from functools import cache
from typing import NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpdet.kernels.cuda.attention.split import score_cap, score_scale
from tpdet.kernels.cuda.launch.sizes import next_power_of_2
from tpdet.kernels.cuda.launch.warp_pipeline import tile_layout
from tpdet.kernels.cuda.pointwise.soft_cap import SoftCap
from tpdet.kernels.order import TILE_TOKENS

_SWIZZLE_BYTES = 128  # a line of a tile in shared memory


class AttentionOperands(NamedTuple):
    """What the kernels read and write at run time, beside the batch.

    q, out: [M, Hq, D], rows of q `q_stride` values apart; k_pages, v_pages: [P, Hkv, 256, D]; all
    bf16, fp16 or fp32, but pages in fp8: uint8 [P, Hkv, 256 * (D + 1)]. sinks: fp32 [Hq], any
    tensor without SINKS. scale: of scores.
    """

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    out: torch.Tensor
    sinks: torch.Tensor
    q_stride: int
    scale: float


class AttentionShape(NamedTuple):
    """What the kernels are compiled for: Hkv, Hq / Hkv, D, and D with the pad to a power of two.

    WINDOW, SINKS: whether there is a window, and sinks.
    """

    KEY_HEADS: int
    GROUP: int
    HEAD: int
    LANES: int
    WINDOW: bool
    SINKS: bool


class AttentionCall(NamedTuple):
    """One call's operands, and what follows from it. window: in keys, 0 without; cap: of scores."""

    operands: AttentionOperands
    shape: AttentionShape
    window: int
    cap: SoftCap | None


def attention_call(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    window: int | None,
    cap: float,
    sinks: torch.Tensor | None,
) -> AttentionCall:
    """The record of tensors as `attention.attend` takes them. cap: 0 for none."""
    _, heads, head = q.shape
    asked = heads, k_pages.shape[1], head, window is not None, sinks is not None, cap
    shape, scale, soft_cap = _constants(*asked)
    sinks = out if sinks is None else sinks
    operands = AttentionOperands(q, k_pages, v_pages, out, sinks, q.stride(0), scale)
    return AttentionCall(operands, shape, window or 0, soft_cap)


def page_tiles(call: AttentionCall, keys: int) -> list[TensorDescriptor]:
    """K and V by `keys`, [keys, D] of 2 bytes, as warps copy them (Hopper); in fp8 pairs of lanes.

    These are int16 [keys, D / 2].
    """
    operands, head = call.operands, call.shape.HEAD
    pages = [operands.k_pages, operands.v_pages]
    if operands.k_pages.dtype == torch.uint8:
        head, pages = head // 2, [x.view(torch.int16) for x in pages]
    layout = tile_layout(min(_SWIZZLE_BYTES, 2 * head), 16)
    return [TensorDescriptor.from_tensor(x.view(-1, head), [keys, head], layout) for x in pages]


def exponent_lines(call: AttentionCall) -> list[TensorDescriptor]:
    """Pages of K and V in fp8 as bytes, by the exponents of a tile's keys [1, 64]."""
    layout, lines = tile_layout(0, 8), [1, TILE_TOKENS]
    pages = call.operands.k_pages, call.operands.v_pages
    return [TensorDescriptor.from_tensor(x.view(-1, TILE_TOKENS), lines, layout) for x in pages]


@cache
def _constants(
    heads: int, key_heads: int, head: int, window: bool, sinks: bool, cap: float
) -> tuple[AttentionShape, float, SoftCap | None]:
    """The shape, the scale of scores and their cap."""
    lanes = next_power_of_2(head)
    shape = AttentionShape(key_heads, heads // key_heads, head, lanes, window, sinks)
    return shape, score_scale(head, cap), score_cap(head, cap)
