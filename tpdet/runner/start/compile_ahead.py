"""Compiles kernels before they are needed: in parallel, and each on one rank of a host.

    compile_ahead(lambda: warm_up(...), world)    # collective; compiles what `warm_up` will launch
    warm_up(...)                                  # compiles nothing

The work runs once without launching a kernel or meeting a peer (`recording`, `without_peers`). The
kernels that it asks for are compiled; no list of them is kept. A rank whose work cannot be recorded
says so in its log and compiles each kernel at its first launch; no other rank waits for it.

Where many kernels are missing, a few ranks have processes that help them (`kernels/cuda/compile/
helpers.py`): a compilation holds a lock of its process.
"""

import hashlib
import logging
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import msgspec
import torch

from tpdet.checkpoint.load_progress import LoadProgress
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.launch.host.kernel_directory import check_caches, own_cache
from tpdet.runner.start.start_times import StartTimes

if TYPE_CHECKING:
    from tpdet.kernels.cuda.compile.helpers import Helpers
    from tpdet.kernels.cuda.compile.recording import Recorded

_log = logging.getLogger("tpdet.engine")

PROCESSES, LEAST_THREADS = 4, 2
"""Processes that compile at once on a host, ranks included, at most; cores that each takes."""


class KernelRequest(msgspec.Struct, frozen=True, array_like=True):
    """A message of one rank to the others: where its compiled kernels are, and which it needs."""

    cache: bytes
    digests: tuple[bytes, ...]


_requests = msgspec.msgpack.Decoder(KernelRequest)


class CompilingAhead:
    """`compile_ahead` for one start: on GPUs alone, timed, and with patience for slow ranks."""

    def __init__(
        self,
        world: World,
        times: StartTimes,
        patience: float,
        enabled: bool,
        precompiled: bool = False,
    ) -> None:
        """patience: seconds that ranks may be apart. Where it is not enabled, nothing is done.

        precompiled: kernels come from `tpdet compile`, so few are expected to be missing.
        """
        self._world = world
        self.enabled = enabled
        """Whether `compile` does anything."""
        self._times, self._patience = times, patience
        self._helpers: Helpers | None = None
        if enabled:
            from tpdet.kernels.cuda.compile.pool import hash_triton

            Thread(target=hash_triton, name="hash of Triton", daemon=True).start()
            self._helpers = open_helpers(world, precompiled)
        self._watching = ExitStack()
        self._late: list[str] = []

    def compile(self, work: Callable[[], object], phase: str) -> None:
        """Compile what `work` would launch. Collective; raises PeerLostError.

        phase: what was done since the last mark.
        """
        if not self.enabled:
            return
        self._watching.close()
        self._times.mark(phase)
        _log.info("compiling kernels")
        before = self._world.timeout
        self._world.set_timeout(max(before, self._patience))
        self._times.kernels += compile_ahead(work, self._world, self._helpers)
        self._world.set_timeout(before)
        self._times.mark("compiling ahead")
        self._watch(self._late.append)

    def finish(self) -> None:
        """End the start: rank 0 logs how long it took, each rank the kernels it did not foresee.

        From now until `close` each rank warns of a kernel that is compiled while it serves.
        """
        self.close()
        if self._late:
            _log.warning(
                "%d kernels were not foreseen and compiled in turn: %s",
                len(self._late),
                ", ".join(sorted(self._late)),
            )
        self._times.announce(self._world.rank)
        if self.enabled:
            self._watch(_warn_of_a_late_one)

    def _watch(self, tell: Callable[[str], object]) -> None:
        from tpdet.kernels.cuda.compile.pool import watching_compilations

        self._watching.enter_context(watching_compilations(tell))

    def close(self) -> None:
        """Watch no more, and end the helpers."""
        self._watching.close()
        if self._helpers is not None:
            self._helpers.close()


def _warn_of_a_late_one(kernel: str) -> None:
    _log.warning("%s was compiled while serving: a step waited for it, no bit changes", kernel)


def open_kernel_cache(
    config: EngineConfig, contract: str, ranks: int, device: torch.device
) -> None:
    """Let Triton read kernels from `--kernel-cache`, if it is given, before it compiles any.

    The cache is checked first, because it is code. contract: the strict one's id. Raises as
    `check_caches`.
    """
    capability = ""
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    directory = check_caches(config.kernel_cache, contract, ranks, device.type, capability)
    if directory is not None:
        from tpdet.kernels.cuda.compile.cache import read_first

        read_first(directory.path)
        _log.info("kernel cache %s: %d kernels", directory.path, directory.kernels)


def open_helpers(world: World, precompiled: bool) -> "Helpers":
    """What helps this rank to compile: its processes start now where the cache is empty."""
    from tpdet.kernels.cuda.compile.helpers import Helpers
    from tpdet.kernels.cuda.compile.pool import FEW

    helpers = Helpers(*helping(len(os.sched_getaffinity(0)), world.local_size))
    if not precompiled and not any(islice(own_cache().glob("*/*.cubin"), FEW, None)):
        helpers.start()
    return helpers


def helping(cores: int, ranks: int) -> tuple[int, int]:
    """The processes that help each of a host's `ranks`, and the threads of each and of the rank."""
    processes = min(PROCESSES, cores // LEAST_THREADS) // ranks
    return max(0, processes - 1), max(1, cores // max(ranks, processes * ranks))


def compile_ahead(
    work: Callable[[], object], world: World, helpers: "Helpers | None" = None
) -> int:
    """Compile what `work` would launch; how many kernels. Collective, on GPUs.

    Raises PeerLostError, and nothing else for whatever `work` or the compiler raise.
    """
    from tpdet.kernels.cuda.compile.pool import compile_all

    recorded = _record(work, world)
    request = msgspec.msgpack.encode(KernelRequest(_cache_digest(), tuple(recorded)))
    everyone = [_requests.decode(data) for data in world.gather_bytes(request)]
    own = share(everyone, world.rank)
    threads = max(1, len(os.sched_getaffinity(0)) // world.local_size)
    progress = LoadProgress(len(own), world.rank == 0, doing="compiling", unit="kernel")
    failed = compile_all([recorded[digest] for digest in own], threads, progress.step, helpers)
    progress.close()
    if helpers is not None and helpers.problems:
        _log.warning("this rank compiled for processes that failed: %s", helpers.problems[0])
        helpers.problems.clear()
    world.barrier()
    # What other ranks compiled lies on disk now; what does not is compiled here after all.
    others = [each for digest, each in recorded.items() if digest not in own]
    failed += compile_all(others, threads)
    if failed:
        _log.warning(
            "%d of %d kernels could not be compiled ahead and are left to their first use: %s",
            len(failed),
            len(recorded),
            failed[0],
        )
    return len(recorded)


def share(everyone: Sequence[KernelRequest], rank: int) -> Mapping[bytes, None]:
    """The digests that `rank` compiles: of ranks with one cache, each digest is one rank's.

    Shares are even: who needs a kernel and has the fewest so far takes it. Alike on every rank.
    """
    holders: dict[bytes, list[int]] = {}
    for other, asked in enumerate(everyone):
        if asked.cache == everyone[rank].cache:
            for digest in asked.digests:
                holders.setdefault(digest, []).append(other)
    taken: Counter[int] = Counter()
    own: dict[bytes, None] = {}
    for digest in sorted(holders, key=lambda digest: (len(holders[digest]), digest)):
        owner = min(holders[digest], key=lambda other: (taken[other], other))
        taken[owner] += 1
        if owner == rank:
            own[digest] = None
    return own


def _record(work: Callable[[], object], world: World) -> "Recorded":
    """The kernels that `work` asks for; those so far if it raises."""
    from tpdet.kernels.cuda.compile.recording import recording

    recorded: Recorded = {}
    try:
        with world.without_peers(), recording() as recorded:
            work()
    except Exception as error:  # a start is slower without this, and no less right
        _log.warning(
            "kernels are compiled one by one from here on, which takes longer: %s: %s",
            type(error).__name__,
            str(error)[:200],
        )
    return recorded


def _cache_digest() -> bytes:
    """A digest that is equal for ranks whose kernel caches are one folder of one host."""
    from triton import knobs

    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text() if boot.is_file() else ""
    return hashlib.sha256(f"{platform.node()}\0{host}\0{knobs.cache.dir}".encode()).digest()
