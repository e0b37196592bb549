"""What a plan's events of states do to the tensors of a rank, before the plan's rows."""

from collections.abc import Iterable

from tpdet.cache.states import StatePool
from tpdet.control.plan import ADVANCE_STATE, CLEAR_STATE, COPY_STATE, FREE_STATE, StateEvent
from tpdet.kernels import ops
from tpdet.kernels.inputs.linear_state import StateMove
from tpdet.kernels.order import CHUNK_TOKENS


def apply_state_events(pool: StatePool, events: Iterable[StateEvent]) -> None:
    """Apply a plan's events, which its rows rely on, in order; what is freed stays as it is.

    A sequence's slot is below `pool.running`, a snapshot's number is what is above. States that
    advance one after the other do so in one launch a layer, as sequences that began together do.
    """
    moves: dict[int, StateMove] = {}
    for event in events:
        position, source, slot = event.chunk * CHUNK_TOKENS, event.source, event.slot
        if event.kind == FREE_STATE:
            continue
        if event.kind != ADVANCE_STATE or slot in moves:
            _advance(pool, moves)
        if event.kind == CLEAR_STATE:
            pool.clear(slot)
        elif event.kind == COPY_STATE and source >= pool.running:
            pool.restore(source - pool.running, slot, position)
        elif event.kind == COPY_STATE:
            pool.keep(source, slot - pool.running, position)
        elif event.kind == ADVANCE_STATE:
            snapshot = slot - pool.running
            pool.keep_tail(source, snapshot, position)
            moves[slot] = StateMove(source, pool.boundary_of(snapshot), event.chunk - 1)
    _advance(pool, moves)


def _advance(pool: StatePool, moves: dict[int, StateMove]) -> None:
    """Make the moves, and forget them."""
    if moves:
        ops.advance_states(pool.layers, tuple(moves.values()))
        moves.clear()
