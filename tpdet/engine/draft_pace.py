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
_OLD = 60.0  # seconds after which the usual time may have been that of an accident


class DraftPace:
    """Times the steps of each call. A step is short if every sequence has few tokens in it."""

    def __init__(self, step_timeout: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """step_timeout: seconds after which a silent rank counts as lost. clock: seconds."""
        self.clock = clock
        self._most = SHARE_OF_TIMEOUT * step_timeout
        self._times: deque[float] = deque(maxlen=_TIMES)  # of a short step, by call
        self._usual = self._fastest = 0.0  # of them
        self._measured = 0.0  # when the latest of them was
        self._began = self._ended = 0.0  # the call, and its latest step
        self._short: list[float] = []  # of the call's short steps

    @property
    def seconds(self) -> float:
        """Of a short step; 0 until it is known.

        Where none was measured for long it is the fastest: who drafts by it measures again.
        """
        if len(self._times) < _ENOUGH:
            return 0.0
        is_old = self.clock() - self._measured > _OLD
        return self._fastest if is_old else self._usual

    def begin(self) -> None:
        """A call has begun."""
        self._began = self._ended = self.clock()
        self._short.clear()

    def left(self, short: bool) -> float:
        """Seconds that the present step may still take."""
        of_call = self._began + self._most
        return (min(self._ended + self._limit(), of_call) if short else of_call) - self.clock()

    def end(self, short: bool, in_time: bool = True) -> None:
        """A step has ended, or (not in_time) is waited for no longer.

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

    def finish(self) -> None:
        """The call has ended: keep what its short steps took."""
        if self._short:
            self._times.append(statistics.fmean(self._short))
            self._usual, self._fastest = statistics.median(self._times), min(self._times)
            self._measured = self._ended

    def _limit(self) -> float:
        return max(SECONDS, TIMES_SLOWER * self._usual)
