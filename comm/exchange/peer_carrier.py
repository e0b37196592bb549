"""The carrier over peer memory: the control words, the all-gather and the watch for lost peers.

    carrier = PeerCarrier(memory)                  # collective
    peers = carrier.peers(shared.addresses)        # what a kernel is given; numbered from 0
    everyones = carrier.all_gather(x)              # small payloads
    carrier.report()                               # last in the step's stream
    carrier.check()                                # once that has run: lost a peer?

One exchange holds one carrier. All its kernels run one after the other (one stream, or several that
wait for each other), and all ranks launch the same ones in the same order.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tpdet.comm.exchange.peer_memory import PeerMemory
from tpdet.errors import PeerLostError
from tpdet.kernels.cuda.exchange.arguments import LOST_BASE, Buffers, Peers
from tpdet.kernels.cuda.hardware import MEASURED

GATHER_WORDS = 1 << 16
"""Words of a rank that one kernel gathers; each travels as 8 bytes."""

_MOST_PROGRAMS = MEASURED.multiprocessors  # all must be on the GPU at once; more were not measured
_LOST, _LIMIT = slice(0, 1), slice(1, 2)  # control words: who was lost, nanoseconds to wait
_LONGEST = 1e9  # seconds of a timeout that 8 bytes of nanoseconds hold with ease
_NANOSECONDS = 1e9


def gather_bytes(ranks: int) -> int:
    """Bytes of a rank's slots for the all-gather: [2, ranks, GATHER_WORDS] of 8 bytes."""
    return 2 * ranks * GATHER_WORDS * 8


class PeerCarrier:
    """Small payloads over peer memory, and the waits of every kernel that is given its `peers`."""

    def __init__(self, memory: PeerMemory) -> None:
        """Collective: every rank makes its carrier together."""
        self.memory, self.world = memory, memory.world
        # On the GPU: a waiting program reads it, and over PCIe the reads of thousands of threads
        # cost 50 ms at a time. The host's copy is `_seen`.
        self._control = torch.zeros(2, dtype=torch.int64, device=memory.device)
        self._seen = memory.host_words(1)
        self._slots = memory.allocate((2, self.world.size, GATHER_WORDS), torch.int64)
        self._slots.own.zero_()  # no tag
        self._gather, self._buffers = self.peers(self._slots.addresses), Buffers(0, GATHER_WORDS)
        self._turns = 0
        self.set_timeout(self.world.timeout)
        memory.settle()

    def peers(self, addresses: torch.Tensor) -> Peers:
        """Peers whose memory begins at `addresses` [ranks] int64, for exchanges of one kind.

        Their numbers begin at 0; `check` reports the peers that they lose.
        """
        counter = torch.zeros(2, dtype=torch.int64, device=self.memory.device)
        programs = min(self.memory.multiprocessors, _MOST_PROGRAMS)
        return Peers(self.world.rank, addresses, counter, self._control, programs)

    def next_turn(self) -> int:
        """Number, on the host, an exchange of those that take two buffers in turn: 1, 2, ..."""
        self._turns += 1
        return self._turns

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[ranks, *x.shape]; sizes that are no whole words of 4 bytes go through the world."""
        from tpdet.kernels.cuda.exchange.gather import run_gather

        if x.numel() == 0 or (x.numel() * x.element_size()) % 4:
            return self.world.all_gather(x)
        words = x.contiguous().view(-1).view(torch.int32)
        parts = []
        for part in words.split(GATHER_WORDS):
            parts.append(part.new_empty(self.world.size, len(part)))
            run_gather(part, parts[-1], self._gather, self._buffers)
        gathered = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return gathered.view(x.dtype).view(self.world.size, *x.shape)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Forget the turns of exchanges inside: peers await what really ran."""
        before = self._turns
        try:
            yield
        finally:
            self._turns = before

    def report(self) -> None:
        """Begin to copy to the host what `check` reads, after what the stream holds so far."""
        self._seen.copy_(self._control[_LOST], non_blocking=True)

    def check(self) -> None:
        """Raise PeerLostError naming the rank; the exchange, like its world, is then broken."""
        found = int(self._seen[0])
        if found:
            number, lost = divmod(found, LOST_BASE)
            raise PeerLostError(
                f"rank {self.world.rank} of {self.world.size} waited {self._timeout:g} s for "
                f"rank {lost - 1} in exchange {number} over peer memory: it is lost or hangs"
            )

    def set_timeout(self, seconds: float) -> None:
        """Bound each wait from now on, also those of graphs that are captured already."""
        self._timeout = seconds
        limit = int(min(seconds, _LONGEST) * _NANOSECONDS)
        self._control[_LIMIT].copy_(torch.tensor([limit]))
