"""A rank of a world that is not there, for work that is recorded and whose results nobody reads."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from tpdet.comm.world.alone import Alone
from tpdet.comm.world.roll_call import ExitReason, PeerReasons
from tpdet.comm.world.world import checked_message, group_of
from tpdet.launch.ranks.node_name import this_node
from tpdet.launch.ranks.rank_environment import RankEnvironment


class RehearsalWorld:
    """One rank of `size` on one host: peers send zeros, and the same bytes as this rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self.timeout = float("inf")
        self.node_names: tuple[str, ...] = (this_node(RankEnvironment()).name,) * size
        self._alone = Alone(size)

    def all_gather(self, x: Tensor) -> Tensor:
        """Zeros [size, *x.shape]."""
        return self._alone.all_gather(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Zeros of x's shape."""
        return self._alone.all_to_all(x)

    def add_in_any_order(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """`data` itself. Raises IntegrityError if it is absent or over the cap."""
        return checked_message(data)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """`data` of every rank. Raises IntegrityError if it is over the cap."""
        return [checked_message(data)] * self.size

    def barrier(self) -> None:
        """Return at once."""

    def part(self, groups: Sequence[Sequence[int]]) -> "RehearsalWorld":
        """The group of this rank, of which the others are not there either."""
        group = group_of(self.rank, self.size, groups)
        return RehearsalWorld(list(group).index(self.rank), len(group))

    def without_peers(self) -> AbstractContextManager[None]:
        """Do nothing: there are no peers."""
        return nullcontext()

    def set_timeout(self, seconds: float) -> None:
        """Store the number; there is no peer to wait for."""
        self.timeout = seconds

    def end_early(self, reason: ExitReason) -> PeerReasons:
        """Do nothing: there are no peers."""
        return PeerReasons({})

    def close(self) -> None:
        """Do nothing."""
