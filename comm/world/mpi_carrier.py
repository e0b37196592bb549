"""Carries tensors by MPI, as bytes: nothing is added and nothing is pickled.

    carrier = open_mpi(rank, size, timeout=60.0)     # once the launcher's ranks run, collective
    carrier.all_gather(gathered, sent, timeout=60.0) # flat uint8 tensors

Buffers are in host memory; GPU memory is used too if every rank's MPI is CUDA-aware (`takes`). MPI
knows nothing of CUDA streams, so each call first waits for the current stream: then the data to be
sent is written, and no earlier kernel still reads the memory that is received into. A call returns
when its request is complete, so nobody reads received data too early.

This module starts and ends MPI, not mpi4py's import and exit: MPI_Finalize would wait for a lost
rank, so a process calls it only if every carrier was left in order. Otherwise mpirun ends the
remaining processes. Requests are tested, not waited for, because MPI has no timeouts.
"""

import atexit
import ctypes
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpdet.errors import PeerLostError, UsageError

_log = logging.getLogger("tpdet.comm")

_SPINS = 200
"""How often a request is tested before the process sleeps between tests."""
_NAP_SECONDS = 50e-6

_BYTE = "B"
"""mpi4py's name for the datatype uint8."""

_open: list["MpiCarrier"] = []
"""Carriers that are in use."""
_abandoned: list[Any] = []
"""Requests that timed out, kept with their buffers because MPI may still write to them."""


class MpiCarrier:
    """One communicator. Its operations raise PeerLostError after `timeout` seconds.

    Both tensors of an operation are on one device, of a kind that the carrier `takes`.
    """

    def __init__(self, communicator: Any, cuda: bool | None = None) -> None:
        """cuda: whether every rank's MPI takes GPU memory; None where ranks have no GPU."""
        self._communicator = communicator
        self._cuda = cuda

    @property
    def name(self) -> str:
        """For logs: "mpi"; for ranks with GPUs "mpi, CUDA-aware" or "mpi, staged"."""
        return "mpi" if self._cuda is None else f"mpi, {'CUDA-aware' if self._cuda else 'staged'}"

    def takes(self, kind: str) -> bool:
        """Whether tensors on `kind` ("cpu" or "cuda") can be sent directly; equal on all ranks."""
        return kind == "cpu" or (kind == "cuda" and bool(self._cuda))

    def all_gather(self, gathered: Tensor, sent: Tensor, timeout: float) -> None:
        """uint8 [n] of every rank -> uint8 [ranks * n]. Raises RuntimeError for MPI's errors."""
        buffers = _buffers(sent, gathered)
        self._finish(self._communicator.Iallgather(*buffers), buffers, timeout)

    def all_to_all(self, received: Tensor, sent: Tensor, timeout: float) -> None:
        """uint8 [ranks * n], block r for rank r -> block s from rank s. Raises RuntimeError."""
        buffers = _buffers(sent, received)
        self._finish(self._communicator.Ialltoall(*buffers), buffers, timeout)

    def part(self, groups: Sequence[Sequence[int]]) -> "MpiCarrier":
        """The carrier of this rank's group, in the group's order. Collective."""
        rank = self._communicator.Get_rank()
        color = next(index for index, group in enumerate(groups) if rank in group)
        communicator = self._communicator.Split(color, groups[color].index(rank))
        return MpiCarrier(communicator, self._cuda)

    def agree_on_cuda(self, mine: bool, timeout: float) -> None:
        """Take GPU memory from now on if every rank's MPI does; rank 0 logs the outcome.

        Collective. Raises PeerLostError.
        """
        everyone = torch.zeros(self._communicator.Get_size(), dtype=torch.uint8)
        self.all_gather(everyone, torch.tensor([mine], dtype=torch.uint8), timeout)
        self._cuda = bool(everyone.all())
        if self._communicator.Get_rank() > 0:
            return
        if self._cuda:
            _log.info("tensors travel by %s", self.name)
        else:
            _log.warning(
                "tensors travel by %s: ranks %s have an MPI that is not CUDA-aware, so all go "
                "through host memory (docs/cluster.md says which MPI is)",
                self.name,
                ", ".join(str(rank) for rank, aware in enumerate(everyone.tolist()) if not aware),
            )

    def leave(self) -> None:
        """The last call, by all ranks of a healthy world: MPI may then end with the process."""
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


def open_mpi(rank: int, size: int, timeout: float, cuda: bool = False) -> MpiCarrier:
    """The carrier of all ranks of one mpirun, or of srun with an MPI. Collective.

    cuda: the ranks have GPUs, and this rank's GPU is the current device. Raises UsageError without
    mpi4py or an MPI library and if MPI counts the ranks otherwise, PeerLostError after `timeout`
    seconds.
    """
    if cuda:
        torch.cuda.synchronize()  # makes the CUDA context, which some MPIs need when they start
    mpi = _started()
    world = mpi.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        raise UsageError(
            f"transport mpi: MPI says rank {world.Get_rank()} of {world.Get_size()}, the launcher "
            f"rank {rank} of {size}: start the ranks with the mpirun of this MPI, or use "
            "--transport gather"
        )
    carrier = MpiCarrier(world.Dup())
    _open.append(carrier)
    if cuda:
        carrier.agree_on_cuda(is_cuda_aware(mpi), timeout)
    return carrier


def _buffers(sent: Tensor, received: Tensor) -> tuple[Any, Any]:
    """Both in the form that mpi4py takes; waits for the current stream of GPU memory."""
    if not sent.is_cuda:
        return sent.numpy(), received.numpy()
    torch.cuda.current_stream(sent.device).synchronize()
    return [sent, _BYTE], [received, _BYTE]


def _started() -> Any:
    """mpi4py's MPI, initialised. Raises UsageError if there is none."""
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


_SWITCH = b"opal_cuda_support"
_MPI_SUCCESS = 0
_THREAD_SINGLE = 0  # the lowest level is enough: MPI_T is called only here, on one thread


def is_cuda_aware(mpi: Any) -> bool:
    """Whether the library behind mpi4py's initialised module `mpi` says that it takes GPU memory.

    A library without these functions takes none. Symbols are looked up in mpi4py's module and the
    libraries it is linked to, so in the one MPI that it uses.
    """
    try:
        library = ctypes.CDLL(mpi.__file__)
        return library.MPIX_Query_cuda_support() == 1 and _switched_on(library)
    except (OSError, AttributeError):
        return False


def _switched_on(library: ctypes.CDLL) -> bool:
    """The value of the control variable; True for a library without it."""
    provided, index, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    handle, value = ctypes.c_void_p(), (ctypes.c_ubyte * 8)()  # a bool or an int, by version
    if library.MPI_T_init_thread(_THREAD_SINGLE, ctypes.byref(provided)) != _MPI_SUCCESS:
        return True
    try:
        if library.MPI_T_cvar_get_index(_SWITCH, ctypes.byref(index)) != _MPI_SUCCESS:
            return True
        allocate = library.MPI_T_cvar_handle_alloc
        if allocate(index, None, ctypes.byref(handle), ctypes.byref(count)) != _MPI_SUCCESS:
            return True
        read = library.MPI_T_cvar_read(handle, ctypes.byref(value)) == _MPI_SUCCESS
        library.MPI_T_cvar_handle_free(ctypes.byref(handle))
        return any(value) if read else True
    finally:
        library.MPI_T_finalize()
