"""The gated delta rule on a GPU: the rows of `kernels/cpu/linear/delta_rule.py`.

The general form takes three launches, for prompts, decode steps and drafts alike: factors of rows
(`gates.py`), what rows of a chunk have to do with each other (`chunk_factors.py`), and the pass
over chunks (`pass_chunks.py`). Two forms with the same bits take its place where they were admitted
(`forms.py`): `decode_rows.py` for sequences with one row, and `whole_chunks.py` for all chunks of a
prompt but those at its ends.
"""

from collections.abc import Sequence

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.launch.dependent import ALONE as NO_PAIR
from tpdet.kernels.cuda.launch.dependent import dependent_launch, take_turn
from tpdet.kernels.cuda.launch.sizes import cdiv, next_power_of_2
from tpdet.kernels.cuda.linear.chunk_factors import chunk_factors
from tpdet.kernels.cuda.linear.decode_launch import launch_decode
from tpdet.kernels.cuda.linear.forms import ALONE, WHOLE, Heads, admitted
from tpdet.kernels.cuda.linear.gates import DeltaStep, factors_of
from tpdet.kernels.cuda.linear.pass_chunks import (
    ALL_CHUNKS,
    FIRST_CHUNK,
    LAST_CHUNK,
    advance_chunks,
    advance_late,
    pass_chunks,
)
from tpdet.kernels.cuda.linear.tables import (
    TILES,
    VECTORS,
    ChunkScratch,
    LinearShape,
    Tables,
    has_rows_alone,
    pieces_of_runs,
)
from tpdet.kernels.cuda.linear.whole_chunks_launch import launch_whole_chunks
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
_LATE_PROGRAMS = 2  # on a multiprocessor: as many as have room
FACTOR_OPTIONS = {"num_warps": 1, "num_stages": 1, "maxnreg": 128}
"""One warp has a tile of 16 x 16, and no two the same numbers of it."""
_LATE_SEQUENCES = 512


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
    if not len(tables.pieces):
        return out
    shape, sequences = shape_of(state), len(tables.states)
    runs = len(tables.runs) if shape.ALONE else sequences
    pieces = pieces_of_runs(batch) if shape.ALONE else len(tables.pieces)
    heads, parts = shape.KEY_HEADS * shape.GROUP, cdiv(shape.VALUE_SIZE, shape.COLUMNS)
    form = {"SHAPE": shape, "num_warps": 4, "enable_fp_fusion": False}
    _advance_late(state, tables, shape._replace(ALONE=False), (heads, parts))
    q, k, v = (_with_dense_rows(x) for x in (q, k, v))
    strides = q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0)
    step = DeltaStep(q, k, v, a, b, *strides)
    if shape.ALONE and has_rows_alone(batch):
        launch_decode(step, gates, state, tables, out, shape)
    if not runs:
        return out
    scratch = chunk_scratch(shape, pieces, k)
    read = step, factors_of(step, gates), state, scratch, tables
    chunk_factors[(heads, pieces)](*read, **form | FACTOR_OPTIONS, **dependent_launch(v.device))
    long = len(batch.blocks) > 0 or batch.short_rows > CHUNK_TOKENS
    apart = long and shape.TWO and admitted(WHOLE, v.device, _heads(state))
    parts_of_run = (FIRST_CHUNK, LAST_CHUNK) if apart else (ALL_CHUNKS,)
    for part in (each.value for each in parts_of_run):
        pass_chunks[(heads, parts, runs)](
            step, state, scratch, tables, out, PART=part, **form, **dependent_launch(v.device)
        )
        if part == FIRST_CHUNK.value:
            launch_whole_chunks(step, state, scratch, tables, out, shape)
    return out


def _advance_late(
    state: LinearState, tables: Tables, shape: LinearShape, grid: tuple[int, int]
) -> None:
    """Launch `advance_late`, of both forms' steps one kernel; grid: heads x parts of the columns.

    Behind the convolution of single rows it is the second of a pair. It reads tables, boundary and
    the rings of keys, updates, inverses and decays, and writes boundary; the convolution writes its
    result and the ring of inputs.
    """
    device, sequences = state.boundary.device, len(tables.states)
    turns = _LATE_PROGRAMS * hardware.gpu_of(device).multiprocessors // (grid[0] * grid[1])
    turn = NO_PAIR if len(tables.runs) else take_turn()
    advance_late[(*grid, max(1, min(sequences, turns)))](
        state,
        tables,
        sequences,
        SHAPE=shape,
        SEQUENCES=_LATE_SEQUENCES,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent_launch(device, turn),
    )


def advance_states(states: Sequence[LinearState], moves: Sequence[StateMove]) -> None:
    """Write boundary[target] of each move: the state of its source behind all rows of the chunk.

    states: of all layers.
    """
    shape, device = shape_of(states[0]), states[0].boundary.device
    table = torch.tensor(moves, dtype=torch.int32)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    heads, parts = shape.KEY_HEADS * shape.GROUP, cdiv(shape.VALUE_SIZE, shape.COLUMNS)
    for state in states:
        advance_chunks[(heads, parts, len(moves))](
            state,
            table,
            SHAPE=shape,
            num_warps=4,
            enable_fp_fusion=False,
            **dependent_launch(device),
        )


def shape_of(state: LinearState) -> LinearShape:
    """What kernels are compiled for."""
    _, heads, key_size, value_size = state.boundary.shape
    key_heads, two = state.keys.shape[2], terms_of(state.keys.dtype) == 2
    return LinearShape(
        key_heads,
        heads // key_heads,
        key_size,
        max(16, next_power_of_2(key_size)),
        value_size,
        min(_COLUMNS, max(16, next_power_of_2(value_size))),
        state.keys.shape[1],
        two,
        two and admitted(ALONE, state.boundary.device, _heads(state)),
    )


def chunk_scratch(shape: LinearShape, pieces: int, k: torch.Tensor) -> ChunkScratch:
    """Room for what chunks make of rows k [M, Hk, Dk]."""
    heads = shape.KEY_HEADS * shape.GROUP

    def room(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        return torch.empty(pieces, *sizes, dtype=dtype, device=k.device)

    kind, terms = (torch.bfloat16, 2) if shape.TWO else (torch.float32, 1)
    return ChunkScratch(
        room(kind, heads, terms, TILES.value, BLOCK_ROWS, BLOCK_ROWS),
        room(torch.float32, heads, VECTORS.value, CHUNK_TOKENS),
        room(k.dtype, shape.KEY_HEADS, CHUNK_TOKENS, shape.KEY_SIZE),
        room(torch.float32, heads, CHUNK_TOKENS, BLOCK_ROWS),
        room(torch.int64, heads, CHUNK_TOKENS),
    )


def _heads(state: LinearState) -> Heads:
    _, value_heads, key_size, value_size = state.boundary.shape
    return state.keys.shape[2], value_heads, key_size, value_size


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x [M, H, D] whose rows may lie apart, each dense."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()
