"""A rank without its peers: while its work is recorded, or in a world that is not there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from tpdet.comm.world.world import NoPeers, group_of
from tpdet.launch.ranks.node_name import this_node
from tpdet.launch.ranks.rank_environment import RankEnvironment


class Alone:
    """True inside `while_inside`; its operations return zeros in the shapes of the real ones."""

    def __init__(self, size: int, beside: "Alone | None" = None) -> None:
        """beside: another world of this rank; both are alone at the same time."""
        self._size = size
        self._inside: list[bool] = [False] if beside is None else beside._inside

    def __bool__(self) -> bool:
        return self._inside[0]

    @contextmanager
    def while_inside(self) -> Iterator[None]:
        """Return zeros in place of the peers' tensors."""
        self._inside[0] = True
        try:
            yield
        finally:
            self._inside[0] = False

    def all_gather(self, x: Tensor) -> Tensor:
        """Zeros [size, *x.shape]."""
        return x.new_zeros((self._size, *x.shape))

    def all_to_all(self, x: Tensor) -> Tensor:
        """Zeros of x's shape, contiguous."""
        return x.new_zeros(x.shape)


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
