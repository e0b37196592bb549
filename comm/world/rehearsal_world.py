"""A rank without its peers: while its work is recorded, or in a world that is not there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from tpdet.comm.world.world import NoPeers, group_of
from tpdet.launch.ranks.node_name import this_node
from tpdet.launch.ranks.rank_environment import RankEnvironment


class Alone:
    """True inside `while_inside`: what peers would send is zeros then."""

    def __init__(self) -> None:
        self._inside = False

    def __bool__(self) -> bool:
        return self._inside

    @contextmanager
    def while_inside(self) -> Iterator[None]:
        """Send nothing, and take zeros for the peers' tensors."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


class RehearsalWorld(NoPeers):
    """One rank of `size` on one host: peers send zeros, and the same bytes as this rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self.node_names: tuple[str, ...] = (this_node(RankEnvironment()).name,) * size

    def all_gather(self, x: Tensor) -> Tensor:
        """Zeros [size, *x.shape]."""
        return x.new_zeros((self.size, *x.shape))

    def all_to_all(self, x: Tensor) -> Tensor:
        """Zeros of x's shape."""
        return x.new_zeros(x.shape)

    def part(self, groups: Sequence[Sequence[int]]) -> "RehearsalWorld":
        """The group of this rank, of which the others are not there either."""
        group = group_of(self.rank, self.size, groups)
        return RehearsalWorld(list(group).index(self.rank), len(group))
