"""How long a draft model's steps take, and how long the next one may take."""

import statistics
import time
from collections import deque
from collections.abc import Callable

SECONDS, TIMES_SLOWER = 1.0, 20.0
"""What a short step may take: a second, or so many times the usual if that is longer."""
SHARE_OF_TIMEOUT = 0.5
"""What all steps of a call may take, of the time after which the ranks that wait give up."""
_TIMES, _ENOUGH = 9, 3  # of calls that are kept, and that tell the usual time
_MANY = 6  # of which the median is taken: graphs are captured in the first
_LARGER = 1.3  # what four times the sequences may take, until it is known
_OLD = 60.0  # seconds after which the usual time may have been that of an accident


class DraftPace:
    """Times the steps of each call. A step is short if every sequence has few tokens in it.

    Times are kept by the sequences of a call, up to a power of four.
    """

    def __init__(self, step_timeout: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """step_timeout: seconds after which a silent rank counts as lost. clock: seconds."""
        self.clock = clock
        self._most = SHARE_OF_TIMEOUT * step_timeout
        self._times: dict[int, deque[float]] = {}  # of a short step, by call
        self._usual: dict[int, float] = {}  # medians of them
        self._measured = 0.0  # when the latest of them was
        self._began = self._ended = 0.0  # the call, and its latest step
        self._size = 0  # of the call
        self._short: list[float] = []  # of the call's short steps
        self._long: deque[float] = deque(maxlen=_TIMES)  # of other steps, by sequence

    def seconds(self, sequences: int) -> float:
        """Of a short step of so many sequences, estimated from fewer or more; 0 until any is known.

        Where none was measured for long it is the fastest: who drafts by it measures again.
        """
        known = [size for size, times in self._times.items() if len(times) >= _ENOUGH]
        if not known:
            return 0.0
        size = _size(sequences)
        near = min(known, key=lambda it: (abs(it - size), it))
        is_old = self.clock() - self._measured > _OLD
        found = min(self._times[near]) if is_old else self._usual[near]
        return found * _LARGER ** max(size - near, 0)

    @property
    def entry_seconds(self) -> float:
        """What a sequence adds to a step that computes prompts; 0 until any was measured."""
        return statistics.median(self._long) if self._long else 0.0

    def begin(self, sequences: int) -> None:
        """A call for so many sequences has begun."""
        self._began = self._ended = self.clock()
        self._size = _size(sequences)
        self._short.clear()

    def left(self, short: bool) -> float:
        """Seconds that the present step may still take."""
        of_call = self._began + self._most
        return (min(self._ended + self._limit(), of_call) if short else of_call) - self.clock()

    def end(self, short: bool, in_time: bool = True, sequences: int = 1) -> None:
        """A step of so many sequences has ended, or (not in_time) is waited for no longer.

        Raises TimeoutError where it took longer than it may.
        """
        in_time &= self.left(short) >= 0.0
        now = self.clock()
        took, self._ended = now - self._ended, now
        if not in_time:
            limit = f"{self._most:.1f} s for all" + (f", {self._limit():.1f} for one" * short)
            raise TimeoutError(
                f"{now - self._began:.1f} s of drafting, {took:.1f} of the last step: over {limit}"
            )
        if short:
            self._short.append(took)
        else:
            self._long.append(took / sequences)

    def finish(self) -> None:
        """The call has ended: keep what its short steps took."""
        if self._short:
            times = self._times.setdefault(self._size, deque(maxlen=_TIMES))
            times.append(statistics.fmean(self._short))
            few = len(times) < _MANY
            self._usual[self._size] = min(times) if few else statistics.median(times)
            self._measured = self._ended

    def _limit(self) -> float:
        return max(SECONDS, TIMES_SLOWER * max(self._usual.values(), default=0.0))


def _size(sequences: int) -> int:
    """The power of four that holds them."""
    return (max(sequences - 1, 0).bit_length() + 1) // 2
