"""How long a draft model's steps take, and how long the next one may take."""

import statistics
import time
from collections import abc, deque

SECONDS, TIMES_SLOWER = 1.0, 20.0
"""What a short step may take: a second, or so many times the usual if that is longer."""
SHARE_OF_TIMEOUT = 0.5
"""What all steps of a call may take, of the time after which the ranks that wait give up."""
_TIMES, _ENOUGH = 9, 3  # of calls that are kept, and that tell the usual time
_MANY = 6  # of which the median is taken: graphs are captured in the first
_LARGER = 1.3  # what four times the sequences may take, until it is known
_OLD = 60.0  # seconds after which the usual time may have been that of an accident


class _UsualTime:
    """The latest times of one kind of step, and the usual of them, in seconds."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_TIMES)
        self.usual = 0.0

    @property
    def are_enough(self) -> bool:
        """Whether there are enough to tell the usual time."""
        return len(self._latest) >= _ENOUGH

    @property
    def fastest(self) -> float:
        """The shortest time."""
        return min(self._latest)

    def add(self, seconds: float) -> None:
        """Another call has ended."""
        self._latest.append(seconds)
        few = len(self._latest) < _MANY
        self.usual = self.fastest if few else statistics.median(self._latest)


class DraftTimes:
    """Times the steps of each call. A step is short if every sequence has few tokens in it.

    A call's first step takes the host longer: it is planned, those behind it are replayed. Times
    are kept by the sequences of a call, up to a power of four.
    """

    def __init__(
        self, step_timeout: float, clock: abc.Callable[[], float] = time.perf_counter
    ) -> None:
        """step_timeout: seconds after which a silent rank counts as lost. clock: seconds."""
        self.clock = clock
        self._most = SHARE_OF_TIMEOUT * step_timeout
        self._firsts: dict[int, _UsualTime] = {}  # of a call's first step, where it was short
        self._others: dict[int, _UsualTime] = {}  # and the mean of those behind it
        self._measured = 0.0  # when the latest of them was
        self._began = self._ended = 0.0  # the call, and its latest step
        self._size = 0  # of the call
        self._first = 0.0  # of the call's steps, if it was short
        self._short: list[float] = []  # the short ones behind it
        self._is_first = True  # the step that ends next
        self._long: deque[float] = deque(maxlen=_TIMES)  # of other steps, by sequence

    def seconds(self, sequences: int) -> float:
        """Seconds of a short step behind the first of a call for so many sequences.

        It is estimated from calls for fewer or more, and from first steps; 0 until any is known.
        Where none was measured for long it is the fastest: who drafts by it measures again.
        """
        return self._estimate(self._others, sequences) or self.first_seconds(sequences)

    def first_seconds(self, sequences: int) -> float:
        """Seconds of a call's first step, where it is short; as `seconds`."""
        return self._estimate(self._firsts, sequences)

    def _estimate(self, by_size: dict[int, _UsualTime], sequences: int) -> float:
        known = [size for size, times in by_size.items() if times.are_enough]
        if not known:
            return 0.0
        size = _size(sequences)
        near = min(known, key=lambda it: (abs(it - size), it))
        is_old = self.clock() - self._measured > _OLD
        seconds = by_size[near].fastest if is_old else by_size[near].usual
        return seconds * _LARGER ** max(size - near, 0)

    @property
    def entry_seconds(self) -> float:
        """Seconds that a sequence adds to a step with prompts; 0 until any was measured."""
        return statistics.median(self._long) if self._long else 0.0

    def begin(self, sequences: int) -> None:
        """A call for so many sequences has begun."""
        self._began = self._ended = self.clock()
        self._size = _size(sequences)
        self._short.clear()
        self._first, self._is_first = 0.0, True

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
        seconds, self._ended = now - self._ended, now
        if not in_time:
            limit = f"{self._most:.1f} s for all" + (f", {self._limit():.1f} for one" * short)
            raise TimeoutError(
                f"{now - self._began:.1f} s of drafting, {seconds:.1f} of the last step: "
                f"over {limit}"
            )
        if not short:
            self._long.append(seconds / sequences)
        elif self._is_first:
            self._first = seconds
        else:
            self._short.append(seconds)
        self._is_first = False

    def finish(self) -> None:
        """The call has ended: keep what its short steps took."""
        if self._first:
            self._firsts.setdefault(self._size, _UsualTime()).add(self._first)
        if self._short:
            self._others.setdefault(self._size, _UsualTime()).add(statistics.fmean(self._short))
        if self._first or self._short:
            self._measured = self._ended

    def _limit(self) -> float:
        times = [*self._firsts.values(), *self._others.values()]
        usual = max((it.usual for it in times), default=0.0)
        return max(SECONDS, TIMES_SLOWER * usual)


def _size(sequences: int) -> int:
    """The power of four that holds them."""
    return (max(sequences - 1, 0).bit_length() + 1) // 2
