"""Exit reasons: a rank that fails reports why; its peers name the rank, its node and the reason.

    with reporting_exit(world, lambda: "step 7"):
        ...                             # all work in which a rank alone may fail, every collective

The other ranks see a failed rank as a lost peer. It reports its reason through the roll call, so
that every rank, on every node, ends with a message that names it. A rank that vanishes without a
report is named, with its node, by all ranks that still reach each other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tpdet.comm.world.roll_call import ExitReason, PeerReasons, rank_list
from tpdet.comm.world.world import World, rank_on_node
from tpdet.errors import PeerLostError, ReloadError, TpdetError

_ADOPTED = (2, 65, 66, 71, 75, 77, 78)
"""Exit codes of a peer that this rank ends with as well; for any other one it ends with 75."""


@contextmanager
def reporting_exit(world: World, during: Callable[[], str]) -> Iterator[None]:
    """Report any error that is raised inside to the other ranks, and raise it again.

    during: names the work in messages. A PeerLostError from inside is replaced by one that names
    the ranks and nodes at fault, with the exit code of their reason.
    """
    try:
        yield
    except ReloadError:
        raise  # raised by all ranks together: the server goes on
    except PeerLostError as error:
        if error.public:
            raise  # explained already
        raise _explained(world, error, during()) from error
    except Exception as error:
        world.end_early(_reason_of(error))
        raise


def give_up(world: World, error: BaseException) -> None:
    """Report `error`, which ends this rank, from outside of `reporting_exit`; end the world.

    Peers that wait for this rank learn of it, on the CPU at once.
    """
    world.end_early(_reason_of(error))


def _reason_of(error: BaseException) -> ExitReason:
    kind = error if isinstance(error, TpdetError) else TpdetError()
    # The full message goes to the logs of the other nodes: the same operator reads them.
    return ExitReason(True, kind.exit_code, kind.code, kind.public, str(error) or repr(error))


def _explained(world: World, error: PeerLostError, during: str) -> PeerLostError:
    """The error with the ranks it is about, as far as the other ranks can be asked."""
    peers = world.end_early(ExitReason(False))
    reasons = {rank: reason for rank, reason in sorted(peers.reasons.items()) if reason.gave_up}
    if not reasons:
        public = f"{during}: {_silence(world, peers)}"
        return PeerLostError(f"{error}; {rank_on_node(world)} says: {public}").explained(public)
    rank, reason = next(iter(reasons.items()))
    who = f"{rank_on_node(world, rank)} gave up"
    more = f" ({len(reasons) - 1} more ranks gave up)" if len(reasons) > 1 else ""
    lost = PeerLostError(f"{who}: {reason.message}{more}; at {during} {error}")
    public = f"{who}: {reason.public}" if reason.public else who
    if reason.exit_code not in _ADOPTED:
        return lost.explained(public)
    return lost.explained(public, reason.exit_code, reason.code)


def _silence(world: World, peers: PeerReasons) -> str:
    """Which ranks do not answer, when none reported a reason."""
    names = dict(enumerate(world.node_names))
    if not peers.store_answers:
        # No rank can be asked: all that is known is that rank 0's node cannot be reached.
        return (
            f"node {world.node_names[0]}, where the ranks of this world meet, cannot be reached "
            f"from node {world.node_names[world.rank]}: it is lost, or one of them is cut off"
        )
    silent = [r for r in range(world.size) if r != world.rank and r not in peers.reasons]
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        return f"{rank_list(silent, names)} {verb} not answer"
    others = rank_list([r for r in range(world.size) if r != world.rank], names)
    return f"the connection between {rank_on_node(world)} and {others} broke, though all run"
