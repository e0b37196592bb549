"""What a rank that cannot go on tells the others, and what it says of a peer that it lost.

    with telling_peers(world, lambda: "step 7"):
        ...                             # whatever a rank alone may fail in, and every collective

An error that ends one rank reaches the others as a lost peer. Its reason goes to them by the roll
call, so that each of them, on every node, ends naming the rank, its node and the reason; and a
rank that says nothing is named, with its node, by all that still hear each other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tpdet.comm.world.roll_call import Heard, LastWord, rank_list
from tpdet.comm.world.world import World, rank_on_node
from tpdet.errors import PeerLostError, ReloadError, TpdetError

_ADOPTED = (2, 65, 66, 71, 75, 77, 78)
"""Exit codes that a lost peer's reason gives this rank too; any other reason is a lost peer."""


@contextmanager
def telling_peers(world: World, during: Callable[[], str]) -> Iterator[None]:
    """Whatever ends this rank inside is told to the others; a lost peer is named and explained.

    during: what the rank was at, for a message. Raises what was raised inside; of a PeerLostError
    it is one that names the ranks and nodes at fault, with the exit code of their reason.
    """
    try:
        yield
    except ReloadError:
        raise  # of all ranks together, and the server goes on
    except PeerLostError as error:
        if error.public:
            raise  # explained already
        raise _explained(world, error, during()) from error
    except Exception as error:
        world.part_with(_word_of(error))
        raise


def give_up(world: World, error: BaseException) -> None:
    """Tell the others that this rank ends by `error`, outside of `telling_peers`; end the world.

    They find it where they wait for this rank, at once on the CPU.
    """
    world.part_with(_word_of(error))


def _word_of(error: BaseException) -> LastWord:
    kind = error if isinstance(error, TpdetError) else TpdetError()
    # What clients may not read, the logs of the other nodes may: they are the same operator's.
    return LastWord(True, kind.exit_code, kind.code, kind.public, str(error) or repr(error))


def _explained(world: World, error: PeerLostError, during: str) -> PeerLostError:
    """The error with whom it is about, as far as the others can be asked."""
    heard = world.part_with(LastWord(False))
    reasons = {rank: word for rank, word in sorted(heard.words.items()) if word.gave_up}
    if not reasons:
        public = f"{during}: {_silence(world, heard)}"
        return PeerLostError(f"{error}; {rank_on_node(world)} says: {public}").told(public)
    rank, word = next(iter(reasons.items()))
    who = f"{rank_on_node(world, rank)} gave up"
    more = f" ({len(reasons) - 1} more ranks gave up)" if len(reasons) > 1 else ""
    found = PeerLostError(f"{who}: {word.reason}{more}; at {during} {error}")
    public = f"{who}: {word.public}" if word.public else who
    if word.exit_code not in _ADOPTED:
        return found.told(public)
    return found.told(public, word.exit_code, word.code)


def _silence(world: World, heard: Heard) -> str:
    """Who does not answer, when nobody told a reason."""
    names = dict(enumerate(world.node_names))
    if not heard.store_answers:
        # Nobody can be asked: of other nodes it is known only that rank 0's is not reached.
        return (
            f"node {world.node_names[0]}, where the ranks of this world meet, cannot be reached "
            f"from node {world.node_names[world.rank]}: it is lost, or one of them is cut off"
        )
    silent = [r for r in range(world.size) if r != world.rank and r not in heard.words]
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        return f"{rank_list(silent, names)} {verb} not answer"
    others = rank_list([r for r in range(world.size) if r != world.rank], names)
    return f"the connection between {rank_on_node(world)} and {others} broke, though all run"
