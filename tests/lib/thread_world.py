"""A world of threads in one process, for tests: milliseconds to start, and stricter than gloo.

The ranks share slots and one meeting point. Every operation also compares its name, and the
shape and dtype of what is gathered, so a rank that takes another path is named instead of hanging.
"""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from tpdet.comm.world.rehearsal_world import Alone
from tpdet.comm.world.roll_call import ExitReason, PeerReasons
from tpdet.comm.world.world import checked_message, group_of, local_place
from tpdet.errors import PeerLostError

Result = TypeVar("Result")
_REASON_SECONDS = 0.3
"""How long a thread that lost a peer waits for the others' exit reasons."""


class _Meeting:
    """What the threads share: two rows of slots used in turn, who has arrived, and who failed."""

    def __init__(self, size: int, whole: "_Meeting | None" = None) -> None:
        """whole: the meeting of the world whose part this is; they fail together."""
        self.size = size
        # One meeting an operation is enough with two rows: whoever writes row 0 again has been to
        # the meeting of row 1, to which every reader of row 0 came after reading.
        self.slots: list[list[Any]] = [[None] * size, [None] * size]
        self.failed: str | None = None
        self.exit_reasons: dict[int, ExitReason] = {}
        self._changed = threading.Condition()
        self._arrived = 0
        self._complete = 0
        self._family: list[_Meeting] = [] if whole is None else whole._family
        self._family.append(self)
        if whole is not None:
            self.failed = whole.failed  # looked at last: a later failure finds this one listed

    def wait(self, timeout: float, reason: str) -> bool:
        """Whether all ranks came; what was complete before a failure stays complete.

        After `timeout` seconds the meeting fails for everybody, with `reason`.
        """
        with self._changed:
            if self.failed:
                return False
            mine = self._complete
            self._arrived += 1
            if self._arrived == self.size:
                self._arrived = 0
                self._complete += 1
                self._changed.notify_all()
                return True
            self._changed.wait_for(lambda: self._complete > mine or self.failed, timeout)
            if self._complete > mine:
                return True
        self.fail(reason)  # takes the lock of one meeting at a time
        return False

    def fail(self, reason: str) -> None:
        """End every rank's present and later operation; the first reason is kept."""
        for meeting in list(self._family):
            with meeting._changed:
                meeting.failed = meeting.failed or reason
                meeting._changed.notify_all()


class ThreadWorld:
    """One thread's place in a world of threads; made by `run_threads`."""

    def __init__(
        self, rank: int, size: int, timeout: float, meeting: _Meeting, nodes: Sequence[int] = ()
    ) -> None:
        """nodes: the node of each rank; () if all are on one."""
        self.rank = rank
        self.size = size
        self.node_names = tuple(f"node{node}" for node in nodes or (0,) * size)
        self.local_rank, self.local_size = local_place(self, range(size))
        self.timeout = timeout
        self._meeting = meeting
        self._count = 0
        self._alone = Alone()
        self._parts: list[ThreadWorld] = []
        self._whole: ThreadWorld | None = None

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: every rank's `x`. Raises PeerLostError."""
        if self._alone:
            return x.new_zeros((self.size, *x.shape))
        kind = f"all_gather of {tuple(x.shape)} {x.dtype}"
        # The copy is made before the meeting: afterwards the sender may write to its tensor.
        copies = self._meet(kind, x.detach().clone(memory_format=torch.contiguous_format))
        return torch.stack(copies)

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size, ...]: block `rank` of every rank's `x`. Raises PeerLostError."""
        if self._alone:
            return x.new_zeros(x.shape)
        kind = f"all_to_all of {tuple(x.shape)} {x.dtype}"
        copies = self._meet(kind, x.detach().clone(memory_format=torch.contiguous_format))
        return torch.stack([copy[self.rank] for copy in copies])

    def add_in_any_order(self, x: Tensor) -> Tensor:
        """The sum in rank order, each addition rounded to x's dtype. Raises PeerLostError."""
        if self._alone:
            return x
        copies = self._meet(f"sum of {tuple(x.shape)} {x.dtype}", x.detach().clone())
        return functools.reduce(torch.add, copies)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes. Raises PeerLostError."""
        message = checked_message(data) if self.rank == 0 else b""
        return self._meet("broadcast_bytes", message)[0]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes in rank order. Raises PeerLostError."""
        return self._meet("gather_bytes", checked_message(data))

    def barrier(self) -> None:
        """Return when all threads came. Raises PeerLostError."""
        self._meet("barrier", None)

    def part(self, groups: Sequence[Sequence[int]]) -> "ThreadWorld":
        """Some of the threads. Raises PeerLostError."""
        if self._whole is not None:
            raise ValueError("a part of a world is not cut again: cut the whole")
        group = group_of(self.rank, self.size, groups)
        first = self.rank == group[0]
        made = _Meeting(len(group), self._meeting) if first else None
        meeting = self._meet(f"part into {groups}", made)[group[0]]
        part = ThreadWorld(group.index(self.rank), len(group), self.timeout, meeting)
        part.local_rank, part.local_size = local_place(self, group)
        part.node_names = tuple(self.node_names[member] for member in group)
        part._alone, part._whole = self._alone, self
        self._parts.append(part)
        return part

    def without_peers(self) -> AbstractContextManager[None]:
        """What comes from peers is zeros while inside."""
        return self._alone.while_inside()

    def set_timeout(self, seconds: float) -> None:
        """Bound each later operation by `seconds`."""
        self.timeout = seconds
        for part in self._parts:
            part.set_timeout(seconds)

    def end_early(self, reason: ExitReason) -> PeerReasons:
        """Report why this thread ends, and end the others' operations; returns their reasons."""
        reasons = self._meeting.exit_reasons
        reasons[self.rank] = reason
        self._meeting.fail(f"rank {self.rank} ended early: {reason.message}")
        deadline = time.monotonic() + (0.0 if reason.gave_up else _REASON_SECONDS)
        while time.monotonic() < deadline and len(reasons) < self.size:
            if any(other.gave_up for other in reasons.copy().values()):
                break
            time.sleep(0.005)
        return PeerReasons({rank: r for rank, r in reasons.copy().items() if rank != self.rank})

    def close(self) -> None:
        """Leave with the others; alone if the world is broken."""
        if self._whole is not None:
            return
        if self._meeting.failed is None:
            with suppress(PeerLostError):
                self._meet("close", None)
        self._meeting.fail("the world is closed")

    def _meet(self, operation: str, value: Any) -> list[Any]:
        """Every rank's `value` in rank order, after all have come to the same operation."""
        self._count += 1
        row = self._meeting.slots[self._count % 2]
        row[self.rank] = (self._count, operation, value)
        began = time.monotonic()
        waited = f"rank {self.rank} waited {self.timeout:g} s in {operation}"
        if not self._meeting.wait(self.timeout, waited):
            raise PeerLostError(
                f"rank {self.rank} of {self.size} lost a peer in {operation} after "
                f"{time.monotonic() - began:.1f} s (timeout {self.timeout:g} s): "
                f"{self._meeting.failed}"
            )
        values = []
        for rank, (count, theirs, their_value) in enumerate(row):
            if (count, theirs) != (self._count, operation):
                reason = (
                    f"rank {rank} diverged: it is in {theirs} (operation {count}), "
                    f"rank {self.rank} in {operation} (operation {self._count})"
                )
                self._meeting.fail(reason)
                raise PeerLostError(reason)
            values.append(their_value)
        return values


def run_threads(
    size: int,
    function: Callable[[ThreadWorld], Result],
    timeout: float = 120.0,
    local_size: int | None = None,
    nodes: Sequence[int] = (),
) -> list[Result]:
    """Run `function(world)` in `size` threads; their results in rank order.

    local_size: pretend that so many neighbouring ranks, not all, share a host. nodes: or say the
    node of each rank.

    An exception in one thread ends the others' operations with PeerLostError naming it, and is
    raised here (the first one, with its rank as a note). `timeout`, in seconds, bounds every
    operation and, for a thread that never comes back, the whole run (PeerLostError).
    """
    meeting = _Meeting(size)
    nodes = nodes or [rank // (local_size or size) for rank in range(size)]
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadWorld(rank, size, timeout, meeting, nodes))
        except BaseException as error:
            failures.append((rank, error))
            meeting.fail(f"rank {rank} ended with {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive() and not failures:
            meeting.fail(f"rank {rank} did not come back")
            raise PeerLostError(f"rank {rank} of {size} did not come back within {timeout:g} s")
    if failures:
        rank, error = failures[0]
        error.add_note(f"in rank {rank} of {size}")
        raise error
    return results
