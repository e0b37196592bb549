"""Finds stop strings in text that arrives in pieces, and holds back text that could begin one.

The match with the smallest end wins; of several that end at the same character, the one that
begins first. This depends on the text alone, not on its division into pieces. Text is released as
soon as no stop string can begin in it, so the released pieces concatenate to the text before the
match.
"""


class StopStringMatcher:
    """Scans one text for `stops`; `include` keeps the matched string at the end of the text."""

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Add the next piece; returns the text that it releases, and the stop string found or None.

        With `may_stop=False` no match may end inside this piece, but a later one may begin in it.
        Nothing may be pushed after a match.
        """
        if not self._stops:
            return text, None
        scanned = len(self._held)
        self._held += text
        if may_stop and (span := self._first_match(scanned)) is not None:
            start, end = span
            return self._held[: end if self._include else start], self._held[start:end]
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released, None

    def flush(self) -> str:
        """Release the text that is still held back, at the end of the text."""
        released, self._held = self._held, ""
        return released

    def _first_match(self, scanned: int) -> tuple[int, int] | None:
        """(start, end) of the match that ends first beyond the characters already scanned."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, scanned - len(stop) + 1))
            end = start + len(stop)
            if start >= 0 and (best is None or (end, start) < (best[1], best[0])):
                best = start, end
        return best


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
