"""Which rank this process is, read from the environment its launcher set.

torchrun sets all of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
a process without any of them runs alone. Another launcher (Slurm, MPI) is one more reader beside
`_read_torchrun`, tried in `read_environment`, which is to refuse two that disagree.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tpdet.errors import UsageError

TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN_ADDRESS_NAMES = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnvironment:
    """A process's place: `rank` of `size`, and `local_rank` of `local_size` on its host.

    `launched` is false for a process started by hand, which is a world of its own. Raises
    UsageError if the numbers contradict each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    def __post_init__(self) -> None:
        if not (
            0 <= self.rank < self.size
            and 0 <= self.local_rank < self.local_size <= self.size
            and self.local_rank <= self.rank
        ):
            raise UsageError(
                f"the launcher's environment contradicts itself: rank {self.rank} of {self.size}, "
                f"local rank {self.local_rank} of {self.local_size}; unset RANK, WORLD_SIZE, "
                "LOCAL_RANK and LOCAL_WORLD_SIZE, or start with torchrun"
            )


def read_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """This process's place. Raises UsageError if the launcher's variables are half set."""
    environ = os.environ if environ is None else environ
    if not any(environ.get(name) for name in TORCHRUN_NAMES):
        return RankEnvironment()
    return _read_torchrun(environ)


def _read_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    required = (*TORCHRUN_NAMES, *TORCHRUN_ADDRESS_NAMES)
    missing = [name for name in required if not environ.get(name)]
    if missing:
        present = [name for name in required if environ.get(name)]
        raise UsageError(
            f"{', '.join(present)} set but not {', '.join(missing)}: start with torchrun, which "
            "sets them all, or unset them to run one rank alone"
        )
    numbers = {}
    for name in TORCHRUN_NAMES:
        text = environ[name]
        if not (text.isascii() and text.isdigit()):
            raise UsageError(
                f"{name} is {text!r}, not a number: start with torchrun, which sets it"
            )
        numbers[name] = int(text)
    return RankEnvironment(
        rank=numbers["RANK"],
        size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_size=numbers["LOCAL_WORLD_SIZE"],
        launched=True,
    )
