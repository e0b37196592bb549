"""Lanes and what a shared expert adds to them, in one pass: no sum of its leaves is written.

    lane_g = (..((+0 + w_a * y_a) + w_b * y_b) ..) + leaf_g * s(gate)     fp32, no fma
    leaf_g[m, n] = sum over k of mixed[m, g * K + k] * down[g, n, k]      one chain, of `column.py`

    M, k, N   tokens, choices of a token (ids ascend), columns
    L, K      lanes of this rank, inputs of a leaf
    y [P, N], ids, weights, positions [M, k]   as in `lanes.py`
    mixed [M, L * K], down [L, N, K]   2-byte values; gate fp32 [M, 1], rows anyhow apart, or None
    sums      fp32 [R, M, N]: the roots of the rank's fold program over its lanes

By leaves apart 8 bytes a value and lane are written and read, 16 with a gate: at 8,192 rows that is
most of a block's time. A tile here holds all choices' sums in registers, and the operands of a leaf
are read while an earlier leaf is added up. `lane_tiles.py` says which steps take which tile, and
which take the programs of `streamed_lanes.py` instead.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.experts.lane_tiles import LaneTile, programs_of_rows, streams, tile_for
from tpdet.kernels.cuda.experts.lanes import lane_of, sum_before, sum_of_lane
from tpdet.kernels.cuda.experts.sorted_tokens import SortedTokens
from tpdet.kernels.cuda.experts.streamed_lanes import stream_lanes, tile_descriptors
from tpdet.kernels.cuda.gemm.ended import ended
from tpdet.kernels.cuda.launch.dependent import await_earlier, dependent_launch
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.cuda.launch.sizes import cdiv
from tpdet.kernels.cuda.pointwise.fold import push_and_add
from tpdet.kernels.cuda.pointwise.gate import opened
from tpdet.kernels.fold_program import own_program
from tpdet.kernels.inputs.experts import Lanes
from tpdet.kernels.inputs.shared_rows import SharedRows
from tpdet.kernels.partial_sums import PartialSums


class JoinedForm(NamedTuple):
    """What a kernel is compiled for: choices of a token, experts of a lane, inputs of a leaf and
    whether there is a gate."""

    CHOSEN: int
    PER_LANE: int
    DEPTH: int
    GATED: bool


@triton.jit
def _leaf_operands(mixed, down, leaf, row, column, rows, width, leaves, FORM: tl.constexpr):
    """One leaf's rows [ROWS, DEPTH] and weights [COLUMNS, DEPTH]."""
    depth = tl.arange(0, FORM.DEPTH)
    from_row = mixed + row[:, None] * (leaves * FORM.DEPTH) + leaf * FORM.DEPTH + depth[None, :]
    from_column = down + (leaf * width + column).to(tl.int64)[:, None] * FORM.DEPTH + depth[None, :]
    x = tl.load(from_row, mask=(row < rows)[:, None], other=0.0)
    w = tl.load(from_column, mask=(column < width)[:, None], other=0.0)
    return x, w


@triton.jit(do_not_specialize=["rows", "first"])
def lane_sums_with_shared(
    y,
    ids,
    weights,
    positions,
    mixed,
    down,
    gate,
    sums,
    rows,
    width,
    first,
    gate_stride,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of tokens by columns, all lanes. first: this rank's first expert."""
    await_earlier(DEPENDENT)
    LEAVES: tl.constexpr = len(PROGRAM.planes)
    CHOSEN: tl.constexpr = FORM.CHOSEN
    AHEAD: tl.constexpr = min(TILE.ahead, LEAVES)
    parts = tl.cdiv(width, TILE.columns)
    row = (tl.program_id(0) // parts).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    column = tl.program_id(0) % parts * TILE.columns + tl.arange(0, TILE.columns)
    real = row < rows
    here = real[:, None] & (column < width)[None, :]
    # 1. the first leaves' operands are on their way
    operands = ()
    for i in tl.static_range(AHEAD):
        leaf = PROGRAM.planes[i]
        read = _leaf_operands(mixed, down, leaf, row, column, rows, width, LEAVES, FORM)
        operands = operands + (read[0], read[1])  # type: ignore[assignment] # noqa: RUF005
    # 2. all weighted rows, read side by side; each is added to those before it in its lane
    sums_so_far = ()
    lanes = ()
    for choice in tl.static_range(CHOSEN):
        choice_index = row * CHOSEN + choice
        position = tl.load(positions + choice_index, mask=real, other=-1).to(tl.int64)
        expert = tl.load(ids + choice_index, mask=real, other=-1)
        own = here & (position >= 0)[:, None]
        from_row = y + (tl.maximum(position, 0) * width)[:, None] + column[None, :]
        finished = tl.load(from_row, mask=own, other=0.0).to(tl.float32)
        weight = tl.load(weights + choice_index, mask=real, other=0.0)
        lane = lane_of(expert, position, first, FORM.PER_LANE)[:, None]
        before = sum_before(sums_so_far, lanes, lane, finished)
        product = weight[:, None] * finished
        sums_so_far = sums_so_far + (before + product,)  # type: ignore[assignment] # noqa: RUF005
        lanes = lanes + (lane,)  # type: ignore[assignment] # noqa: RUF005
    if FORM.GATED:
        factor = opened(tl.load(gate + row * gate_stride, mask=real, other=0.0))[:, None]
    # 3. a lane is its last sum and its leaf; and the fold over lanes
    stack = ()
    plane = rows.to(tl.int64) * width
    for i in tl.static_range(LEAVES):
        if i + AHEAD < LEAVES:
            leaf = PROGRAM.planes[i + AHEAD]
            read = _leaf_operands(mixed, down, leaf, row, column, rows, width, LEAVES, FORM)
            operands = operands + (read[0], read[1])  # type: ignore[assignment] # noqa: RUF005
        x = operands[0]  # type: ignore[misc] # no longer the empty tuple
        w = operands[1]  # type: ignore[misc]
        operands = operands[2:]
        added = ended(tl.dot(x, tl.trans(w), input_precision="ieee"))
        if FORM.GATED:
            added = added * factor
        total = sum_of_lane(sums_so_far, lanes, PROGRAM.planes[i])
        stack = push_and_add(stack, total + added, PROGRAM.additions[i])
        if PROGRAM.roots[i] >= 0:
            to = sums + PROGRAM.roots[i] * plane + (row * width)[:, None] + column[None, :]
            tl.store(to, stack[0], mask=here)
            stack = stack[1:]


def fold_lanes_with_shared(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    sorted_tokens: SortedTokens,
    lanes: Lanes,
    shared: SharedRows,
    tile: LaneTile | None = None,
) -> PartialSums:
    """As `fold_lanes`, with the products of a shared expert's leaves.

    tile: overrides the choice; it shows in time only. Raises ValueError for operands that do not
    fit.
    """
    experts, roots = lanes.experts, lanes.roots
    (rows, chosen), width, leaf = ids.shape, y.shape[1], shared.down.shape[2]
    _check(shared, rows, width, lanes)
    sums = torch.empty(len(roots), rows, width, dtype=torch.float32, device=y.device)
    if tile is None:
        tile = tile_for(rows, streams(width, lanes.held, leaf, chosen, y.device))
    if sums.numel():
        mixed, down, gate = shared
        blocks, parts = cdiv(rows, tile.rows), cdiv(width, tile.columns)
        choices = y, ids, weights, sorted_tokens.positions
        gates, gate_stride = (sums, 1) if gate is None else (gate, gate.stride(0))
        others = gates, sums, rows, width, experts.start, gate_stride
        options = {
            "FORM": JoinedForm(chosen, len(experts) // lanes.held, leaf, gate is not None),
            "PROGRAM": own_program(roots),
            "num_warps": tile.warps,
            "enable_fp_fusion": False,
        }
        if tile.streamed:
            tiles = tile_descriptors(mixed, down)
            parts = programs_of_rows(blocks, parts, multiprocessors(y.device))
            stream_lanes[(blocks * parts,)](
                *choices, *tiles, *others, parts, **options, **dependent_launch(y.device)
            )
        else:
            lane_sums_with_shared[(blocks * parts,)](
                *choices, mixed, down, *others, TILE=tile, **options, **dependent_launch(y.device)
            )
    return PartialSums(sums, tuple(range(len(roots))))


def _check(shared: SharedRows, rows: int, width: int, lanes: Lanes) -> None:
    mixed, down, gate = shared
    leaf = down.shape[2]
    if down.shape != (lanes.held, width, leaf) or mixed.shape != (rows, lanes.held * leaf):
        raise ValueError(
            f"rows {tuple(mixed.shape)} and weights {tuple(down.shape)} do not fit {lanes.held} "
            f"lanes of {rows} x {width}"
        )
    if not shared.joins(leaf, mixed.dtype) or mixed.dtype != down.dtype:
        raise ValueError(f"leaves of {leaf} {mixed.dtype} by {down.dtype}: multiply them apart")
    if not (mixed.is_contiguous() and down.is_contiguous()):
        raise ValueError("rows and weights of a shared expert must be contiguous")
    if gate is not None and (gate.shape != (rows, 1) or gate.dtype != torch.float32):
        raise ValueError(f"a gate {tuple(gate.shape)} {gate.dtype}: give fp32 [{rows}, 1]")
