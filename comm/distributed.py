"""A world on torch.distributed: one process a rank, gloo on the CPU, NCCL on GPUs.

Ranks and addresses come from the launcher's environment. Byte messages always travel through gloo
and host memory (`frames`), tensors through the backend of their device, as bytes. No object
collective and no pickle is used, and a reduction by the approximate mode alone (`library_sum`).
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tpdet.comm.alone import Alone
from tpdet.comm.frames import (
    BROADCAST_FRAME,
    GATHER_FRAME,
    inline_bytes,
    pack_frame,
    pack_rest,
    unpack_frame,
)
from tpdet.comm.library_sum import library_sum
from tpdet.comm.world import checked_message
from tpdet.errors import PeerLostError, UsageError
from tpdet.launch.environment import RankEnvironment, read_environment

LOOPBACK = "lo"


class DistributedWorld:
    """The ranks of one job of torchrun, srun or mpirun.

    `device` is "cpu" or "cuda". `staged` sends CUDA tensors through host memory and gloo, for ranks
    that share a GPU, which NCCL refuses. `timeout` bounds each operation, `start_timeout` the
    arrival of all ranks; both in seconds. Raises UsageError without a launcher's environment,
    PeerLostError if a rank does not arrive.
    """

    def __init__(
        self,
        device: str = "cpu",
        timeout: float = 60.0,
        start_timeout: float = 300.0,
        environment: RankEnvironment | None = None,
        staged: bool = False,
    ) -> None:
        environment = environment or read_environment()
        if not environment.launched:
            raise UsageError(
                "a distributed world needs a launcher's environment: start with "
                "`torchrun --nproc-per-node N`, srun or mpirun, or use a world of one rank"
            )
        self.rank = environment.rank
        self.size = environment.size
        self.timeout = start_timeout
        address = f"[{environment.address}]" if ":" in environment.address else environment.address
        self._meeting = f"tcp://{address}:{environment.port}" if address else "env://"
        self._sequence = 0
        self._broken: str | None = None
        self._closed = False
        self._alone = Alone(self.size)
        # NCCL carries CUDA tensors unless they are staged; everything else is gloo's.
        self._device = "cpu" if staged else device
        self.one_host = environment.local_size == environment.size
        self._group: dist.ProcessGroup | None = None
        self._owns_default_group = not dist.is_initialized()
        self._prepare_backends(environment)
        with self._peers_needed("start of the process group"):
            self._group = self._join(start_timeout)
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
        backend = "gloo" if self._device == "cpu" else "cpu:gloo,cuda:nccl"
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

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None once the world is closed or broken."""
        return self._group

    @property
    def carries_cuda(self) -> bool:
        """Whether CUDA tensors travel from GPU to GPU: each rank has one of its own."""
        return self._device == "cuda"

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: every rank's bytes in rank order. Raises PeerLostError."""
        if self._alone:
            return self._alone.all_gather(x)
        sent = self._carried(x)
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=sent.device)
        if x.numel() == 0:
            return gathered.to(x.device)
        with self._peers_needed(f"all_gather of {tuple(x.shape)} {x.dtype}"):
            _gather_flat(_as_bytes(gathered), _as_bytes(sent), self._group)
        return gathered.to(x.device)

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size, ...]: the blocks that all ranks had for this one. Raises PeerLostError."""
        if self._alone:
            return self._alone.all_to_all(x)
        sent = self._carried(x)
        received = torch.empty_like(sent)
        if x.numel() == 0:
            return received.to(x.device)
        with self._peers_needed(f"all_to_all of {tuple(x.shape)} {x.dtype}"):
            dist.all_to_all_single(_as_bytes(received), _as_bytes(sent), group=self._group)
        return received.to(x.device)

    def add_in_any_order(self, x: Tensor) -> Tensor:
        """The backend's all-reduce, in x's dtype. Raises PeerLostError."""
        if self._alone:
            return x
        total = self._carried(x)
        if x.numel():
            with self._peers_needed(f"all-reduce of {tuple(x.shape)} {x.dtype}"):
                library_sum(total, self._group)
        return total.to(x.device)

    def _carried(self, x: Tensor) -> Tensor:
        """x, contiguous, where the backend can take it."""
        return (x if x.device.type == self._device else x.cpu()).contiguous()

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes; one collective up to 4,076 of them, else two. Raises PeerLostError."""
        self._sequence += 1
        if self.rank == 0:
            message = checked_message(data)
            frame = pack_frame("broadcast_bytes", self._sequence, message, BROADCAST_FRAME)
        else:
            frame = torch.empty(BROADCAST_FRAME, dtype=torch.uint8)
        with self._peers_needed("broadcast_bytes"):
            dist.broadcast(frame, group=self._group, group_src=0)
            length, start = unpack_frame(frame, "broadcast_bytes", self._sequence, sender=0)
            if len(start) == length:
                return start
            rest_bytes = length - len(start)
            if self.rank == 0:
                rest = pack_rest(message, BROADCAST_FRAME, rest_bytes)
            else:
                rest = torch.empty(rest_bytes, dtype=torch.uint8)
            dist.broadcast(rest, group=self._group, group_src=0)
        return start + rest.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes; one collective up to 1,004 of them. Raises PeerLostError."""
        return self._exchange("gather_bytes", checked_message(data))

    def barrier(self) -> None:
        """Return when all ranks came. Raises PeerLostError."""
        self._exchange("barrier", b"")

    def _exchange(self, operation: str, data: bytes) -> list[bytes]:
        self._sequence += 1
        with self._peers_needed(operation):
            frames = self._gather_uint8(pack_frame(operation, self._sequence, data, GATHER_FRAME))
            parts = [
                unpack_frame(frames[rank], operation, self._sequence, rank)
                for rank in range(self.size)
            ]
            rest_bytes = max(length for length, _ in parts) - inline_bytes(GATHER_FRAME)
            if rest_bytes <= 0:
                return [start for _, start in parts]
            rests = self._gather_uint8(pack_rest(data, GATHER_FRAME, rest_bytes))
        return [
            start + rests[rank, : length - len(start)].numpy().tobytes()
            for rank, (length, start) in enumerate(parts)
        ]

    def _gather_uint8(self, frame: Tensor) -> Tensor:
        """uint8 [size, n] from every rank's uint8 [n], in host memory."""
        frames = torch.empty((self.size, frame.numel()), dtype=torch.uint8)
        _gather_flat(frames.view(-1), frame, self._group)
        return frames

    def without_peers(self) -> AbstractContextManager[None]:
        """What comes from peers is zeros while inside."""
        return self._alone.while_inside()

    def set_timeout(self, seconds: float) -> None:
        """Bound each later operation by `seconds`."""
        self.timeout = seconds
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), self._group)

    def close(self) -> None:
        """Leave together with the other ranks, or alone if the world is broken."""
        if self._closed:
            return
        if self._broken is None:
            # Sockets that close under a peer's last operation would look like a lost rank.
            with suppress(PeerLostError):
                self.barrier()
        self._closed = True
        self._broken = self._broken or "the world is closed"
        self._leave()

    def _leave(self) -> None:
        """Give up the group; its sockets close when the last reference goes."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(None if self._owns_default_group else group)

    @contextmanager
    def _peers_needed(self, operation: str) -> Iterator[None]:
        """Turn whatever torch.distributed raises inside into PeerLostError, and stay broken."""
        if self._broken is not None:
            raise PeerLostError(self._broken)
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError, OSError, PeerLostError) as error:
            self._broken = (
                f"rank {self.rank} of {self.size} lost a peer in {operation} after "
                f"{time.monotonic() - began:.1f} s (timeout {self.timeout:g} s): {_reason(error)}"
            )
            if self._device == "cpu":
                # A peer that waits for this rank learns of the loss now, not at its timeout.
                # (NCCL could hang here with a kernel in flight; there the process's end does it.)
                self._leave()
            raise PeerLostError(self._broken) from error


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _gather_flat(gathered: Tensor, flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `gathered` [size * n] with every rank's `flat` [n] (torch < 2.13: the older name)."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, flat, group=group)


def _reason(error: Exception) -> str:
    """The telling part of torch's message: without its source location and advice."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0]


def refuse_multicast(value: str) -> None:
    """Raise UsageError unless NCCL's NVLink multicast is off: it adds inside the switch."""
    if value != "0":
        raise UsageError(
            f"NCCL_NVLS_ENABLE is {value!r}: NVLink multicast must stay off, set NCCL_NVLS_ENABLE=0"
        )
