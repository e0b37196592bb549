"""The phases of a start: their times, and the remedy where a GPU's memory runs out in one."""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tpdet.config import EngineConfig
from tpdet.errors import ResourceError

CHECKING = "checking the kernels"
LOADING = "loading the weights"
TRYING = "trying the kernels and every size of step"
MAKING_PAGES = "making the KV pages and CUDA graphs"

_LOADING = "lower --max-num-batched-tokens, end what else runs on the GPU, or use more GPUs (--tp)"
_STEPS = "lower --max-num-batched-tokens or --max-model-len, or use more GPUs (--tp)"
_PAGES = f"lower --gpu-memory-utilization or --kv-pages, {_STEPS}"
_REMEDY = {CHECKING: _LOADING, LOADING: _LOADING, TRYING: _STEPS, MAKING_PAGES: _PAGES}
"""What needs less memory, by what is being done."""

_log = logging.getLogger("tpdet.engine")


class StartTimes:
    """Phases one after the other: `mark` ends one, and time with no mark belongs to the next."""

    doing = CHECKING
    """What the start does now, for an error that tells of it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.kernels = 0
        """Kernels that were known before their first use: compiled ahead or found compiled."""
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._last = clock()

    def mark(self, phase: str) -> None:
        """What was done since the last mark was `phase`; a phase may come in several parts."""
        now = self._clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the beginning to the last mark."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
        return f"{self.total:.1f} s ({parts})"

    def announce(self, rank: int) -> None:
        """Say in rank 0's log how long it took."""
        if rank == 0:
            ahead = f", {self.kernels} kernels known ahead" if self.kernels else ""
            _log.info("engine up in %s%s", self, ahead)


@contextmanager
def naming_memory(config: EngineConfig, times: StartTimes) -> Iterator[None]:
    """Raise a ResourceError in place of what CUDA and its libraries raise for a full GPU."""
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if "out of memory" not in message:  # torch, Triton, NCCL and the driver all say so
            raise
        raise ResourceError(
            f"GPU memory ran out while {times.doing} of {config.model}{_figures(message)}: "
            f"{_REMEDY[times.doing]}"
        ) from None


def _figures(message: str) -> str:
    """The bytes in torch's message, if it has them."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", message)
    free = re.search(r"of which ([\d.]+ \w+) is free", message)
    if asked is None or free is None:
        return ""
    return f" ({asked.group(1)} more were needed, {free.group(1)} are free)"
