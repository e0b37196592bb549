"""What a plan's events of states do to the tensors of a rank, before the plan's rows."""

from collections.abc import Iterable

from tpdet.cache.states import StatePool
from tpdet.control.plan import ADVANCE_STATE, CLEAR_STATE, COPY_STATE, StateEvent
from tpdet.kernels import ops
from tpdet.kernels.inputs.linear_state import StateMove
from tpdet.kernels.order import CHUNK_TOKENS


def apply_state_events(pool: StatePool, events: Iterable[StateEvent]) -> None:
    """Apply a plan's events, which its rows rely on, in order; what is freed stays as it is.

    A sequence's slot is below `pool.running`, a snapshot's number is what is above.
    """
    for event in events:
        position, source, slot = event.chunk * CHUNK_TOKENS, event.source, event.slot
        if event.kind == CLEAR_STATE:
            pool.clear(slot)
        elif event.kind == COPY_STATE and source >= pool.running:
            pool.restore(source - pool.running, slot, position)
        elif event.kind == COPY_STATE:
            pool.keep(source, slot - pool.running, position)
        elif event.kind == ADVANCE_STATE:
            snapshot = slot - pool.running
            pool.keep_tail(source, snapshot, position)
            move = StateMove(source, pool.boundary_of(snapshot), event.chunk - 1)
            ops.advance_states(pool.layers, (move,))
