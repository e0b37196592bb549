"""How likely a draft is right, by its drafter and by how far that could be trusted."""

_FIRST = (0.5, 0.7, 0.85, 0.95, 0.98, 0.99)  # of trust 4 to 7, 8 to 15, ... tokens
_SURE = 4.0  # drafts that an assumed chance counts for
_KEPT = 0.98  # of what was known before, by each row
_MOST = 0.999


class Chances:
    """The share of right drafts, of all sequences; the latest rows count most."""

    def __init__(self) -> None:
        self._right: dict[tuple[str, int], tuple[float, float]] = {}  # drafts: right, tried

    def of(self, name: str, trust: int) -> float:
        """That the next draft of a drafter is right."""
        right, tried = self._known(name, _level(trust))
        return min(right / tried, _MOST)

    def learn(self, name: str, trust: int, accepted: int, drafted: int) -> None:
        """The first `accepted` of a row's `drafted` drafts were right; those behind the first wrong
        one say nothing.
        """
        key = name, _level(trust)
        right, tried = self._known(*key)
        tested = accepted + (accepted < drafted)
        self._right[key] = right * _KEPT + accepted, tried * _KEPT + tested

    def _known(self, name: str, level: int) -> tuple[float, float]:
        return self._right.get((name, level), (_SURE * _FIRST[level], _SURE))


def _level(trust: int) -> int:
    return min(max(trust.bit_length() - 3, 0), len(_FIRST) - 1)
