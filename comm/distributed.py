"""A world on torch.distributed: one process a rank, gloo on the CPU, NCCL on GPUs.

Ranks and addresses come from the launcher's environment; for what travels how see `group_world`.
"""

import os
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from tpdet.comm.group_world import GroupWorld
from tpdet.comm.mpi_carrier import open_mpi
from tpdet.errors import PeerLostError, UsageError
from tpdet.launch.environment import RankEnvironment, read_environment

LOOPBACK = "lo"


class DistributedWorld(GroupWorld):
    """The ranks of one job of torchrun, srun or mpirun.

    `device` is "cpu" or "cuda". `staged` sends CUDA tensors through host memory and gloo, for ranks
    that share a GPU, which NCCL refuses; `mpi` sends them through host memory and MPI. `timeout`
    bounds each operation, `start_timeout` the arrival of all ranks; both in seconds. Raises
    UsageError without a launcher's environment and for an MPI that does not know the ranks,
    PeerLostError if a rank does not arrive.
    """

    def __init__(
        self,
        device: str = "cpu",
        timeout: float = 60.0,
        start_timeout: float = 300.0,
        environment: RankEnvironment | None = None,
        staged: bool = False,
        mpi: bool = False,
    ) -> None:
        environment = environment or read_environment()
        if not environment.launched:
            raise UsageError(
                "a distributed world needs a launcher's environment: start with "
                "`torchrun --nproc-per-node N`, srun or mpirun, or use a world of one rank"
            )
        place = environment.rank, environment.size
        here = environment.local_rank, environment.local_size
        # NCCL carries CUDA tensors unless they are staged; everything else is gloo's, or MPI's.
        super().__init__(place, here, "cpu" if staged or mpi else device, start_timeout)
        address = f"[{environment.address}]" if ":" in environment.address else environment.address
        self._meeting = f"tcp://{address}:{environment.port}" if address else "env://"
        self._closed = False
        self._owns_default_group = not dist.is_initialized()
        self._prepare_backends(environment)
        with self._peers_needed("start of the process group"):
            self._group = self._join(start_timeout)
        if mpi:
            self._carrier = open_mpi(self.rank, self.size)
        self.set_timeout(timeout)

    def _prepare_backends(self, environment: RankEnvironment) -> None:
        """Settings that gloo and NCCL read from the environment when the group is made."""
        if environment.local_size == environment.size:
            # All ranks are on this host: nothing needs to listen on a real interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        if self._device == "cuda":
            refuse_multicast(os.environ.setdefault("NCCL_NVLS_ENABLE", "0"))

    def _join(self, start_timeout: float) -> dist.ProcessGroup:
        """The group of all ranks: the process's default group, or a new one if that is taken."""
        backend = self._backend
        limit = timedelta(seconds=start_timeout)
        if not self._owns_default_group:
            # The user's script has a group of its own, whose backends and timeout stay as they are.
            return dist.new_group(backend=backend, timeout=limit)
        store, _, _ = next(dist.rendezvous(self._meeting, self.rank, self.size, timeout=limit))
        # A process may open worlds one after the other; addresses of an earlier one are stale.
        opened = store.add(f"tpdet/worlds/{self.rank}", 1)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"tpdet/world/{opened}", store),
            rank=self.rank,
            world_size=self.size,
            timeout=limit,
        )
        group = dist.group.WORLD
        assert group is not None
        return group

    def close(self) -> None:
        """Leave together with the other ranks, or alone if the world is broken."""
        if self._closed:
            return
        if self._broken is None:
            # Sockets that close under a peer's last operation would look like a lost rank.
            with suppress(PeerLostError):
                self.barrier()
                if self._carrier is not None:
                    self._carrier.leave()
        self._closed = True
        self._broken = self._broken or "the world is closed"
        self._leave()

    def _leave(self) -> None:
        """Give up the groups; their sockets close when the last reference goes."""
        super()._leave()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(None if self._owns_default_group else group)


def refuse_multicast(value: str) -> None:
    """Raise UsageError unless NCCL's NVLink multicast is off: it adds inside the switch."""
    if value != "0":
        raise UsageError(
            f"NCCL_NVLS_ENABLE is {value!r}: NVLink multicast must stay off, set NCCL_NVLS_ENABLE=0"
        )
