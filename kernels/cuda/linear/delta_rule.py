"""The gated delta rule on a GPU: the rows of `kernels/cpu/linear/delta_rule.py`, in three launches.

Factors of rows (`gates.py`), what rows of a chunk have to do with each other (`chunk_factors.py`),
and the pass over chunks (`pass_chunks.py`). Prefill, decode and drafts are the same kernels.
"""

from collections.abc import Sequence

import torch

from tpdet.kernels.cuda.launch.dependent import dependent_launch
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.linear.chunk_factors import chunk_factors
from tpdet.kernels.cuda.linear.gates import DeltaStep, factors_of
from tpdet.kernels.cuda.linear.pass_chunks import advance_chunks, advance_late, pass_chunks
from tpdet.kernels.cuda.linear.tables import ChunkScratch, LinearShape, Tables
from tpdet.kernels.inputs.linear_state import (
    BLOCK_ROWS,
    DeltaGates,
    LinearState,
    StateMove,
    terms_of,
)
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import CHUNK_TOKENS

_COLUMNS = 32
_LATE_TURNS = 8
_LATE_SEQUENCES = 256


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    gates: DeltaGates,
    state: LinearState,
    batch: PagedBatch,
) -> torch.Tensor:
    """q, k [M, Hk, Dk], v [M, Hv, Dv] behind the convolution, a, b [M, Hv] -> o [M, Hv, Dv].

    As the CPU's. Rows that no sequence names are undefined. That states stand where rows begin, and
    that drafts cross one end of a chunk at most, is the state table's to check.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    tables = Tables.of(batch)
    sequences, pieces = len(tables.states), len(tables.pieces)
    if not pieces:
        return out
    shape = _shape(state)
    heads, parts = shape.KEY_HEADS * shape.GROUP, cdiv(shape.VALUE_SIZE, shape.COLUMNS)
    form = {"SHAPE": shape, "num_warps": 4, "enable_fp_fusion": False}
    advance_late[(min(sequences, _LATE_TURNS), heads, parts)](
        state, tables, sequences, SEQUENCES=_LATE_SEQUENCES, **form, **dependent_launch(v.device)
    )
    q, k, v = (_with_dense_rows(x) for x in (q, k, v))
    strides = q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0)
    step = DeltaStep(q, k, v, a, b, *strides)
    factors = factors_of(step, gates)

    def fp32(*sizes: int) -> torch.Tensor:
        return torch.empty(pieces, *sizes, dtype=torch.float32, device=v.device)

    keys = (pieces, shape.KEY_HEADS, CHUNK_TOKENS, shape.KEY_SIZE)
    scratch = ChunkScratch(
        torch.empty(keys, dtype=k.dtype, device=k.device),
        fp32(heads, 2, CHUNK_TOKENS, CHUNK_TOKENS),
        fp32(heads, CHUNK_TOKENS, BLOCK_ROWS),
        fp32(heads, CHUNK_TOKENS),
        fp32(heads, CHUNK_TOKENS),
    )
    read = step, factors, state, scratch, tables
    chunk_factors[(pieces, heads)](*read, **form, **dependent_launch(v.device))
    pass_chunks[(sequences, heads, parts)](*read, out, **form, **dependent_launch(v.device))
    return out


def advance_states(states: Sequence[LinearState], moves: Sequence[StateMove]) -> None:
    """Write boundary[target] of each move: the state of its source behind all rows of the chunk.

    states: of all layers.
    """
    shape, device = _shape(states[0]), states[0].boundary.device
    table = torch.tensor(moves, dtype=torch.int32)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    heads, parts = shape.KEY_HEADS * shape.GROUP, cdiv(shape.VALUE_SIZE, shape.COLUMNS)
    for state in states:
        advance_chunks[(len(moves), heads, parts)](
            state,
            table,
            SHAPE=shape,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(device),
        )


def _shape(state: LinearState) -> LinearShape:
    _, heads, key_size, value_size = state.boundary.shape
    key_heads = state.keys.shape[2]
    return LinearShape(
        key_heads,
        heads // key_heads,
        key_size,
        max(16, next_power_of_2(key_size)),
        value_size,
        min(_COLUMNS, max(16, next_power_of_2(value_size))),
        state.keys.shape[1],
        terms_of(state.keys.dtype) == 2,
    )


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x [M, H, D] whose rows may lie apart, each dense."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()
