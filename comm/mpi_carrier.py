"""Tensors carried by MPI: buffers in host memory go as bytes, nothing is added or pickled.

    carrier = open_mpi(rank, size)                   # once the launcher's ranks run, collective
    carrier.all_gather(gathered, sent, timeout=60.0) # flat uint8 tensors

MPI is started and ended here, not by mpi4py's import and exit: after a lost rank MPI_Finalize would
wait for it, so a process ends MPI only if every carrier was left in health. Without that, mpirun
ends what still runs. Requests are tested, not waited for, because MPI has no timeouts.
"""

import atexit
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tpdet.errors import PeerLostError, UsageError

_SPINS = 200
"""Tests of a request before the process sleeps between them."""
_NAP_SECONDS = 50e-6

_open: list["MpiCarrier"] = []
"""Carriers that were not left yet."""
_abandoned: list[Any] = []
"""Requests that timed out, with their buffers, which MPI may still write to."""


class MpiCarrier:
    """One communicator. Its operations raise PeerLostError after their timeout, in seconds."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def all_gather(self, gathered: Tensor, sent: Tensor, timeout: float) -> None:
        """uint8 [n] of every rank -> uint8 [ranks * n]. Raises RuntimeError for MPI's errors."""
        buffers = sent.numpy(), gathered.numpy()
        self._finish(self._communicator.Iallgather(*buffers), buffers, timeout)

    def all_to_all(self, received: Tensor, sent: Tensor, timeout: float) -> None:
        """uint8 [ranks * n], block r for rank r -> block s from rank s. Raises RuntimeError."""
        buffers = sent.numpy(), received.numpy()
        self._finish(self._communicator.Ialltoall(*buffers), buffers, timeout)

    def part(self, groups: Sequence[Sequence[int]]) -> "MpiCarrier":
        """Of the group that holds this rank, in the group's order. Collective."""
        rank = self._communicator.Get_rank()
        color = next(index for index, group in enumerate(groups) if rank in group)
        return MpiCarrier(self._communicator.Split(color, groups[color].index(rank)))

    def leave(self) -> None:
        """The last call, of all ranks of a healthy world: MPI may end with the process."""
        if self in _open:
            _open.remove(self)

    @staticmethod
    def _finish(request: Any, buffers: tuple[Any, Any], timeout: float) -> None:
        deadline, tests = time.monotonic() + timeout, 0
        while not request.Test():
            tests += 1
            if tests > _SPINS:
                time.sleep(_NAP_SECONDS)
            if time.monotonic() > deadline:
                _abandoned.append((request, buffers))
                raise PeerLostError("MPI has no answer of all ranks")


def open_mpi(rank: int, size: int) -> MpiCarrier:
    """All ranks of one mpirun, or of srun with an MPI. Collective.

    Raises UsageError without mpi4py or an MPI library, and if MPI counts the ranks otherwise.
    """
    world = _started().COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        raise UsageError(
            f"transport mpi: MPI says rank {world.Get_rank()} of {world.Get_size()}, the launcher "
            f"rank {rank} of {size}: start the ranks with the mpirun of this MPI, or use "
            "--transport gather"
        )
    carrier = MpiCarrier(world.Dup())
    _open.append(carrier)
    return carrier


def _started() -> Any:
    """mpi4py's MPI, initialised. Raises UsageError."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"transport mpi needs mpi4py and an MPI library: pip install 'tpdet[mpi]' ({error})"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
        atexit.register(_end, MPI)
    return MPI


def _end(mpi: Any) -> None:
    if not _open and not mpi.Is_finalized():
        mpi.Finalize()
