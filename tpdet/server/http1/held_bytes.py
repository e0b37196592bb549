"""A bound on the bytes of all requests that have arrived, in whole or part, and wait for work.

Past the bound the largest body that is still incomplete is refused, so that small requests do not
pay for large ones that never end.
"""

from collections.abc import Callable

HEADER_OVERHEAD_BYTES = 100  # what Python adds to the text of a header


class HeldBytes:
    """The bytes that all requests hold now, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._arriving: set[Hold] = set()

    def hold(self, refuse: Callable[[], None]) -> "Hold":
        """The account of a request that begins; `refuse` ends it when others need the room."""
        found = Hold(self, refuse)
        self._arriving.add(found)
        return found

    def change(self, size: int) -> None:
        """Count bytes that came, or went (negative)."""
        self.total += size

    def arrived(self, hold: "Hold") -> None:
        """The request is whole, or gone: it makes no room any more."""
        self._arriving.discard(hold)

    def make_room(self, asking: "Hold") -> bool:
        """Refuse the largest arriving requests until the rest fits; False if `asking` is it."""
        while self.total > self.limit:
            largest = max(self._arriving, key=lambda hold: hold.size, default=asking)
            if largest is asking:
                return False
            largest.release()
            largest.refuse()
        return True


class Hold:
    """The bytes that one request holds."""

    def __init__(self, budget: HeldBytes, refuse: Callable[[], None]) -> None:
        self._budget, self.refuse = budget, refuse
        self.size = 0
        self._released = False

    def add(self, size: int) -> bool:
        """Count bytes that came; False if there is no room for them: refuse the request."""
        if self._released:
            return True
        self.size += size
        self._budget.change(size)
        return self._budget.total <= self._budget.limit or self._budget.make_room(self)

    def arrived(self) -> None:
        """The request is whole."""
        self._budget.arrived(self)

    def release(self) -> None:
        """Nothing of the request is held any more, whatever still arrives of it."""
        if not self._released:
            self._released = True
            self._budget.change(-self.size)
            self._budget.arrived(self)
