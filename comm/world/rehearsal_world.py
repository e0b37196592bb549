"""A rank of a world that is not there, for work that is recorded and whose results nobody reads."""

from collections.abc import Sequence

from torch import Tensor

from tpdet.comm.world.alone import Alone
from tpdet.comm.world.world import NoPeers, group_of
from tpdet.launch.ranks.node_name import this_node
from tpdet.launch.ranks.rank_environment import RankEnvironment


class RehearsalWorld(NoPeers):
    """One rank of `size` on one host: peers send zeros, and the same bytes as this rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self.node_names: tuple[str, ...] = (this_node(RankEnvironment()).name,) * size
        self._alone = Alone(size)

    def all_gather(self, x: Tensor) -> Tensor:
        """Zeros [size, *x.shape]."""
        return self._alone.all_gather(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Zeros of x's shape."""
        return self._alone.all_to_all(x)

    def part(self, groups: Sequence[Sequence[int]]) -> "RehearsalWorld":
        """The group of this rank, of which the others are not there either."""
        group = group_of(self.rank, self.size, groups)
        return RehearsalWorld(list(group).index(self.rank), len(group))
