"""A world on torch.distributed: one process a rank, gloo on the CPU, NCCL on GPUs.

Ranks and addresses come from the launcher's environment; `group_world` says what travels how.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from tpdet.comm.world.group_world import GroupWorld
from tpdet.comm.world.mpi_carrier import open_mpi
from tpdet.comm.world.roll_call import RollCall, rank_list
from tpdet.comm.world.store_listener import store_listener
from tpdet.errors import PeerLostError, ResourceError, UsageError
from tpdet.launch.ranks.environment import LOOPBACK_ADDRESS, RankEnvironment, read_environment
from tpdet.launch.ranks.node_name import expected_nodes, this_node

LOOPBACK = "lo"
START_TIMEOUT = 300.0
"""Seconds within which all ranks have to arrive, by default."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set by an agent that hosts the ranks' store
_kept: dict[tuple[str, int], dist.Store] = {}
"""The stores that this process hosts, or shares as a file; they live as long as the process."""


class DistributedWorld(GroupWorld):
    """The ranks of one job, started by a command of tpdet, torchrun, srun or mpirun.

    `device` is "cpu" or "cuda". `staged` sends CUDA tensors through host memory and gloo, for ranks
    that share a GPU, which NCCL refuses. `mpi` sends tensors by MPI; an MPI that is not CUDA-aware
    gets them in host memory. `timeout` bounds each operation, `start_timeout` the arrival of all
    ranks; both are in seconds. `watch` is called again and again until all have arrived, and may
    raise what ends the wait.

    Raises UsageError without a launcher's environment, for an MPI that counts the ranks otherwise,
    and, on every rank, if local ranks contradict each other. Raises PeerLostError if a rank does
    not arrive, naming it and, where the launcher knows it, its node.
    """

    def __init__(
        self,
        device: str = "cpu",
        timeout: float = 60.0,
        start_timeout: float = START_TIMEOUT,
        environment: RankEnvironment | None = None,
        staged: bool = False,
        mpi: bool = False,
        watch: Callable[[], None] | None = None,
    ) -> None:
        environment = environment or read_environment()
        if not environment.launched:
            raise UsageError(
                "a distributed world needs a launcher's environment: start with "
                "`torchrun --nproc-per-node N`, srun or mpirun, or use a world of one rank"
            )
        place = environment.rank, environment.size
        here = environment.local_rank, environment.local_size
        # NCCL carries CUDA tensors unless they are staged; gloo or MPI carries everything else.
        super().__init__(place, here, "cpu" if staged or mpi else device, start_timeout)
        self._closed = False
        self._owns_default_group = not dist.is_initialized()
        self._prepare_backends(environment)
        store = self._meet(environment, start_timeout, watch)
        with self._peers_needed("start of the process group"):
            self._group = self._join(store, start_timeout)
        if mpi:
            self._carrier = open_mpi(self.rank, self.size, start_timeout, device == "cuda")
        self.set_timeout(timeout)

    def _prepare_backends(self, environment: RankEnvironment) -> None:
        """Set what gloo and NCCL read from the environment when the group is made."""
        if environment.local_size == environment.size:
            # All ranks are on this host: nothing needs to listen on a real interface.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, LOOPBACK)
        if self._device == "cuda":
            refuse_multicast(os.environ.setdefault("NCCL_NVLS_ENABLE", "0"))

    def _meet(
        self, environment: RankEnvironment, limit: float, watch: Callable[[], None] | None
    ) -> dist.Store:
        """This world's store, once all ranks have arrived there. Raises PeerLostError."""
        expected = expected_nodes(environment)
        if self._owns_default_group:
            whole, hosts = open_store(environment, expected, limit)
        else:
            # The user's script has made the default group: its ranks have met already.
            whole, hosts = dist.distributed_c10d._get_default_store(), self.rank == 0
        try:
            # A process may open several worlds in turn; an earlier one's entries are stale.
            opened = whole.add(f"tpdet/worlds/{self.rank}", 1)
            store = dist.PrefixStore(f"tpdet/world/{opened}", whole)
            self._roll = RollCall(store, self.rank, self.size, hosts)
            node, here = this_node(environment), (self.local_rank, self.local_size)
            self.node_names = self._roll.arrive(node, expected, limit, here, watch)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank} of {self.size} lost the store where ranks meet, which is "
                f"{environment.store or _host_of_store(expected)}: {error}"
            ) from error
        return store

    def _join(self, store: dist.Store, start_timeout: float) -> dist.ProcessGroup:
        """The group of all ranks: the process's default group, or a new one if that is taken."""
        limit = timedelta(seconds=start_timeout)
        if not self._owns_default_group:
            # The default group is the user's: its backends and timeout stay as they are.
            return dist.new_group(backend=self._backend, timeout=limit)
        dist.init_process_group(
            self._backend, store=store, rank=self.rank, world_size=self.size, timeout=limit
        )
        group = dist.group.WORLD
        assert group is not None
        return group

    def close(self) -> None:
        """Leave together with the other ranks, or alone if the world is broken."""
        if self._closed:
            return
        if self._broken is None:
            # Sockets closed during a peer's last operation would look like a lost rank.
            with suppress(PeerLostError):
                self.barrier()
                if self._carrier is not None:
                    self._carrier.leave()
        self._closed = True
        self._roll = None
        self._broken = self._broken or "the world is closed"
        self._leave()

    def _leave(self) -> None:
        """Destroy the groups; their sockets close with the last reference."""
        super()._leave()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(None if self._owns_default_group else group)


def open_store(
    environment: RankEnvironment, expected: Sequence[str], limit: float
) -> tuple[dist.Store, bool]:
    """The store where ranks meet, and whether this process hosts it.

    The store is a file where a command of tpdet started the ranks. Otherwise an agent of torchrun
    hosts it, or rank 0 does, until its process ends (a store that ended earlier could be gone just
    when the first rank to open a second world connects to it). Rank 0 listens on the meeting
    point's address only; on one host that is the loopback address. Ranks that come before the host
    retry for `limit` seconds. Raises PeerLostError naming a host that does not answer,
    ResourceError for a port in use.
    """
    if environment.store:
        if (environment.store, 0) not in _kept:
            _kept[environment.store, 0] = dist.FileStore(environment.store, environment.size)
        return _kept[environment.store, 0], False
    address = environment.address or os.environ.get("MASTER_ADDR", "")
    port = environment.port or int(os.environ.get("MASTER_PORT", "0"))
    by_agent = not environment.address and os.environ.get(_AGENT_STORE) == str(True)
    if environment.one_host and not by_agent:
        address = LOOPBACK_ADDRESS
    hosts = environment.rank == 0 and not by_agent
    if hosts and (address, port) in _kept:
        return _kept[address, port], True
    try:
        listener = store_listener(address, port) if hosts else None
        # The host does not wait for the others here: the roll call does, and names them.
        store = dist.TCPStore(
            address,
            port,
            environment.size,
            hosts,
            timedelta(seconds=limit),
            wait_for_workers=False,
            multi_tenant=not by_agent and listener is None,
            master_listen_fd=listener,
        )
    except (dist.DistError, OSError) as error:
        if hosts:
            raise ResourceError(
                f"rank 0 cannot listen at {address}:{port}, where ranks meet ({error}): set "
                "MASTER_PORT to a free one, on every rank"
            ) from error
        who = "torchrun's agent" if by_agent else rank_list([0], dict(enumerate(expected)))
        raise PeerLostError(
            f"nobody answers at {address}:{port} within {limit:g} s, where {who} has to listen: "
            "look at its log, check that its node is up and that this one reaches the port "
            "(docs/cluster.md), or raise --start-timeout"
        ) from error
    if hosts:
        _kept[address, port] = store
    return store, hosts


def _host_of_store(expected: Sequence[str]) -> str:
    return f"that of {rank_list([0], dict(enumerate(expected)))} or its torchrun"


def refuse_multicast(value: str) -> None:
    """Raise UsageError unless NCCL's NVLink multicast is off: with it, the switch adds."""
    if value != "0":
        raise UsageError(
            f"NCCL_NVLS_ENABLE is {value!r}: NVLink multicast must stay off, set NCCL_NVLS_ENABLE=0"
        )
