"""The rank, the sizes and the meeting point of a process, as its launcher set them."""

from dataclasses import dataclass

from tpdet.errors import UsageError


@dataclass(frozen=True)
class RankEnvironment:
    """A process's place: `rank` of `size`, and `local_rank` of `local_size` on its host.

    The launcher numbers local ranks as it likes: their order need not be that of the ranks, and the
    ranks of a host need not be neighbours. Once the ranks have met, `node_name.check_places` checks
    that each local rank is there once.

    `launched` is false for a process started by hand, which runs alone. `launcher` is the name of
    the program that started it. `session` names this start on this host, if the launcher has a
    name for it. Ranks meet in the file `store` or at `address` and `port`; without either, where
    torchrun's environment says. Raises UsageError if the numbers contradict each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False
    launcher: str = ""
    session: str = ""
    address: str = ""
    port: int = 0
    store: str = ""

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise UsageError(
                f"the environment of {self.launcher or 'the launcher'} contradicts itself: rank "
                f"{self.rank} of {self.size}, local rank {self.local_rank} of {self.local_size}; "
                "unset what a shell or script set of it (torchrun's are RANK, WORLD_SIZE, "
                "LOCAL_RANK and LOCAL_WORLD_SIZE), or start with torchrun, srun or mpirun"
            )

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_size == self.size
