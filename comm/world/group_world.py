"""A world on one process group of torch.distributed, and the parts of that world.

Byte messages always travel through gloo and host memory (`frames`). Tensors travel as bytes,
through the backend of their device or through MPI. No object collective and no pickle is used; a
library's reduction is used by the approximate mode only (`library_sum`).
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tpdet.comm.world.frames import (
    BROADCAST_FRAME,
    GATHER_FRAME,
    inline_bytes,
    pack_frame,
    pack_rest,
    unpack_frame,
)
from tpdet.comm.world.library_sum import library_sum
from tpdet.comm.world.mpi_carrier import MpiCarrier
from tpdet.comm.world.rehearsal_world import Alone
from tpdet.comm.world.roll_call import ExitReason, PeerReasons, RollCall
from tpdet.comm.world.world import checked_message, group_of, local_place
from tpdet.errors import PeerLostError


class GroupWorld:
    """The ranks of one process group. A part breaks together with the whole it belongs to."""

    def __init__(
        self,
        place: tuple[int, int],
        local_place: tuple[int, int],
        device: str,
        timeout: float,
        whole: "GroupWorld | None" = None,
    ) -> None:
        """place: rank and size; local_place: local rank and local size on this host.

        device: "cpu" or "cuda", where tensors travel; timeout: seconds of each operation; whole:
        the world whose part this is.
        """
        self.rank, self.size = place
        self.local_rank, self.local_size = local_place
        self.timeout = timeout
        self._device = device
        self._whole = whole
        self._sequence = 0
        self._alone: Alone = Alone() if whole is None else whole._alone
        self._parts: list[GroupWorld] = []
        self._group: dist.ProcessGroup | None = None
        self._carrier: MpiCarrier | None = None  # carries tensors in place of the group
        self._broken: str | None = None
        self._roll: RollCall | None = None  # None in a part
        self.node_names: tuple[str, ...] = ("",) * self.size  # until all ranks have arrived

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_size == self.size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None once the world is closed or broken."""
        return self._group

    @property
    def carries_cuda(self) -> bool:
        """Whether CUDA tensors travel from GPU to GPU: each rank has its own GPU."""
        return self._device == "cuda"

    @property
    def by_mpi(self) -> str:
        """`MpiCarrier.name` of the MPI that carries tensors; "" where none does."""
        return "" if self._carrier is None else self._carrier.name

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: every rank's bytes in rank order. Raises PeerLostError."""
        by_mpi = None if self._carrier is None else self._carrier.all_gather
        return self._exchanged("all_gather", x, (self.size, *x.shape), by_mpi, _gather_flat)

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size, ...]: the blocks that all ranks had for this one. Raises PeerLostError."""
        by_mpi = None if self._carrier is None else self._carrier.all_to_all
        return self._exchanged("all_to_all", x, x.shape, by_mpi, dist.all_to_all_single)

    def _exchanged(
        self,
        operation: str,
        x: Tensor,
        shape: Sequence[int],
        by_mpi: Callable[[Tensor, Tensor, float], None] | None,
        by_group: Callable[..., object],
    ) -> Tensor:
        """What peers sent in one operation, as a tensor of a shape; sent is x, as bytes."""
        if self._alone:
            return x.new_zeros(tuple(shape))
        kind = self._travels_on(x)
        sent, received = _on(kind, x), _room(kind, shape, x)
        if x.numel() == 0:
            return received.to(x.device)
        with self._peers_needed(f"{operation} of {tuple(x.shape)} {x.dtype}"):
            if by_mpi is not None:
                by_mpi(_as_bytes(received), _as_bytes(sent), self.timeout)
            else:
                by_group(_as_bytes(received), _as_bytes(sent), group=self._group)
        return received.to(x.device)

    def add_in_any_order(self, x: Tensor) -> Tensor:
        """The backend's all-reduce, in x's dtype. Raises PeerLostError."""
        if self._alone:
            return x
        total = _on(self._device, x)  # always by the group, also where MPI carries tensors
        if x.numel():
            with self._peers_needed(f"all-reduce of {tuple(x.shape)} {x.dtype}"):
                library_sum(total, self._group)
        return total.to(x.device)

    def _travels_on(self, x: Tensor) -> str:
        """The kind of device x is sent from: its own where the carrier takes it, or the group's."""
        if self._carrier is not None and self._carrier.takes(x.device.type):
            return x.device.type
        return self._device

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes; up to 4,076 bytes take one collective, more two. Raises PeerLostError."""
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
        """Every rank's bytes; up to 1,004 bytes take one collective. Raises PeerLostError."""
        return self._exchange("gather_bytes", checked_message(data))

    def barrier(self) -> None:
        """Return when all ranks have called it. Raises PeerLostError."""
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
        """Every rank's uint8 [n] as uint8 [size, n], in host memory."""
        frames = torch.empty((self.size, frame.numel()), dtype=torch.uint8)
        _gather_flat(frames.view(-1), frame, self._group)
        return frames

    def without_peers(self) -> AbstractContextManager[None]:
        """While inside, whatever would come from peers is zeros."""
        return self._alone.while_inside()

    def set_timeout(self, seconds: float) -> None:
        """Bound each later operation by `seconds`."""
        self.timeout = seconds
        for part in self._parts:
            part.set_timeout(seconds)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), self._group)

    def part(self, groups: Sequence[Sequence[int]]) -> "GroupWorld":
        """The part of this rank's group: another process group. Raises PeerLostError."""
        if self._whole is not None:
            raise ValueError("a part of a world is not cut again: cut the whole")
        group_here = group_of(self.rank, self.size, groups)
        place, here = (group_here.index(self.rank), len(group_here)), local_place(self, group_here)
        part = GroupWorld(place, here, self._device, self.timeout, self)
        part.node_names = tuple(self.node_names[member] for member in group_here)
        limit = timedelta(seconds=self.timeout)
        with self._peers_needed(f"part into {len(groups)} groups"):
            for group in groups:  # every rank makes every group, in one order
                made = dist.new_group([*group], timeout=limit, backend=self._backend)
                part._group = made if group is group_here else part._group
            if self._carrier is not None:
                part._carrier = self._carrier.part(groups)
        self._parts.append(part)
        return part

    def end_early(self, reason: ExitReason) -> PeerReasons:
        """Report why this rank ends; after a lost peer, wait for the reasons of the others."""
        if self._whole is not None:
            return self._whole.end_early(reason)
        if self._roll is None:
            return PeerReasons({}, store_answers=False)
        reasons = self._roll.report(reason)
        if self._broken is None:
            self._broken = f"rank {self.rank} of {self.size} has given up: {reason.message}"
            self._leave_if_safe()
        return reasons

    @property
    def _backend(self) -> str:
        return "gloo" if self._device == "cpu" else "cpu:gloo,cuda:nccl"

    def close(self) -> None:
        """Do nothing: a part ends with the whole."""

    def _leave(self) -> None:
        """Destroy the groups of the parts."""
        for part in self._parts:
            part._leave()
            group, part._group = part._group, None
            if group is not None:
                dist.destroy_process_group(group)

    def _leave_if_safe(self) -> None:
        """End waiting peers now, not at their timeout, by closing this rank's connections.

        NCCL could hang here while a kernel runs; with it, the end of the process closes them.
        """
        if self._device == "cpu":
            self._leave()

    @contextmanager
    def _peers_needed(self, operation: str) -> Iterator[None]:
        """Turn any error of torch.distributed into PeerLostError, and mark the world broken."""
        whole = self._whole or self
        among = "" if whole is self else f" among {self.size} ranks of a part"
        if whole._broken is not None:
            raise PeerLostError(whole._broken)
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError, OSError, PeerLostError) as error:
            whole._broken = (
                f"rank {whole.rank} of {whole.size} lost a peer in {operation}{among} after "
                f"{time.monotonic() - began:.1f} s (timeout {self.timeout:g} s): {_reason(error)}"
            )
            whole._leave_if_safe()
            raise PeerLostError(whole._broken) from error


def _on(kind: str, x: Tensor) -> Tensor:
    """x, contiguous, on `kind` ("cpu" or "cuda")."""
    return x.contiguous() if x.device.type == kind else _room(kind, x.shape, x).copy_(x)


def _room(kind: str, shape: Sequence[int], x: Tensor) -> Tensor:
    """An empty tensor of x's dtype on `kind`; pinned host memory where x is on a GPU."""
    staged = x.is_cuda and kind == "cpu"
    device = x.device if x.device.type == kind else kind
    return torch.empty(tuple(shape), dtype=x.dtype, device=device, pin_memory=staged)


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _gather_flat(gathered: Tensor, flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `gathered` [size * n] with every rank's `flat` [n]; torch < 2.13 has the older name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, flat, group=group)


def _reason(error: Exception) -> str:
    """The first sentence of torch's message, without its source location."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0]
