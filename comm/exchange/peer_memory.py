"""Memory of every rank's GPU that all ranks of the host can read and write.

PyTorch's symmetric memory does the mapping (virtual memory handles that the ranks exchange). NVLink
multicast adds inside the switch and stays off. Allocating is collective: every rank asks for the
same shapes in the same order, before any graph is captured.

    memory = open_peer_memory(world)          # None where it cannot be had
    part = memory.allocate((rows, width), torch.bfloat16)
    part.own.copy_(weights); memory.settle()  # now everyone may read everyone's part
    part.addresses                            # [ranks] int64 on the GPU, as seen from this rank
"""

import os
from dataclasses import dataclass
from typing import cast

import torch

from tpdet.comm.world.group_world import GroupWorld
from tpdet.comm.world.rehearsal_world import RehearsalWorld
from tpdet.comm.world.world import World
from tpdet.errors import PeerLostError, UsageError
from tpdet.kernels.cuda.hardware import gpu_of

_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True)
class PeerTensor:
    """One tensor a rank, all of one shape: `own` is this rank's, `addresses` [ranks] int64."""

    own: torch.Tensor
    addresses: torch.Tensor

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [M] int64 -> fp32 rows [M, width] of the table whose parts these are, in rank order.

        What the parts hold must have been settled.
        """
        from tpdet.kernels.cuda.exchange.gather import embed_from_peers

        return embed_from_peers(ids, self.own, self.addresses)


class PeerMemory:
    """Tensors on the GPUs of one world that every rank may address."""

    def __init__(self, world: GroupWorld, device: torch.device) -> None:
        """Refuses multicast: it is off, or a UsageError is raised."""
        if os.environ.setdefault(_MULTICAST, "1") != "1":
            raise UsageError(
                f"{_MULTICAST} is {os.environ[_MULTICAST]!r}: NVLink multicast must stay off, "
                f"set {_MULTICAST}=1"
            )
        self.world = world
        self.device = device
        self._handles: list[object] = []  # a mapping lasts as long as its handle

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> PeerTensor:
        """Uninitialised memory of `shape` on every rank. Collective; raises PeerLostError."""
        import torch.distributed._symmetric_memory as symmetric

        group = self.world.process_group
        if group is None:
            raise PeerLostError("the world is closed: nobody to share memory with")
        own = symmetric.empty(shape, dtype=dtype, device=self.device)
        handle = symmetric.rendezvous(own, group)
        self._handles.append(handle)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self.device)
        return PeerTensor(own, addresses)

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of this rank's GPU: as many programs of one each run at once."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def host_words(self, count: int) -> torch.Tensor:
        """int64 [count], zero, in host memory that this rank's GPU can address."""
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)

    def settle(self) -> None:
        """Return when what all ranks' GPUs were given to do is done. Collective."""
        torch.cuda.synchronize(self.device)
        self.world.barrier()


class RehearsalMemory(PeerMemory):
    """Tensors of a rank of a world that is not there: kernels that get them are not launched."""

    def __init__(self, world: RehearsalWorld, device: torch.device) -> None:
        self.world = cast(GroupWorld, world)
        self.device = device

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> PeerTensor:
        """Zeros of `shape`, and addresses of nothing."""
        own = torch.zeros(shape, dtype=dtype, device=self.device)
        return PeerTensor(own, torch.zeros(self.world.size, dtype=torch.int64, device=self.device))

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of the GPU that the device is taken for."""
        return gpu_of(self.device).multiprocessors

    def host_words(self, count: int) -> torch.Tensor:
        """int64 [count], zero."""
        return torch.zeros(count, dtype=torch.int64)

    def settle(self) -> None:
        """Nothing was given to any GPU to do."""


def open_peer_memory(world: World) -> PeerMemory | None:
    """Peer memory, if every rank of the world can reach every other's GPU. Collective."""
    mine, device = _reachable(world)
    everyone = world.gather_bytes(b"\1" if mine else b"\0")
    if not all(said == b"\1" for said in everyone) or device is None:
        return None
    assert isinstance(world, GroupWorld)
    return PeerMemory(world, device)


def memory_for(transport: str, world: World, device: torch.device) -> PeerMemory | None:
    """Peer memory for a transport: "peer" must have it, "auto" takes it if it can, others never.

    Collective. Raises UsageError when "peer" cannot be had, and for "mpi" where MPI does not carry
    the world; a single rank needs neither.
    """
    if (
        transport == "mpi"
        and world.size > 1
        and not (isinstance(world, GroupWorld) and world.by_mpi)
    ):
        raise UsageError(
            "transport mpi needs ranks that talk by MPI: start the server with mpirun, or use "
            "--transport gather"
        )
    if isinstance(world, RehearsalWorld):
        there = transport in ("auto", "peer") and world.size > 1
        return RehearsalMemory(world, device) if there else None
    memory = None
    if transport in ("auto", "peer") and device.type == "cuda" and world.size > 1:
        memory = open_peer_memory(world)
    if memory is None and transport == "peer" and world.size > 1:
        raise UsageError(
            "transport peer needs every rank on one host, each with a GPU of its own that can "
            "address the others': use --transport gather"
        )
    return memory


def _reachable(world: World) -> tuple[bool, torch.device | None]:
    """Whether this rank's GPU is its own and has access to all others; all say something."""
    usable = (
        isinstance(world, GroupWorld)
        and world.size > 1
        and world.process_group is not None
        and world.carries_cuda
        and world.one_host
        and torch.cuda.is_available()
    )
    index = torch.cuda.current_device() if usable else -1
    everyone = [int(said) for said in world.gather_bytes(str(index).encode())]
    if not usable or min(everyone) < 0 or len({*everyone}) != world.size:
        return False, None
    others = [other for other in everyone if other != index]
    access = all(
        other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(index, other)
        for other in others
    )
    return access, torch.device("cuda", index)
