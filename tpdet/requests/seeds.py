"""The seeds of requests that bring none: an engine gives each the next of its own."""

from tpdet.kernels.exact.philox import philox4x32

_WORD_BITS, _WORD_MASK = 32, 0xFFFFFFFF  # of Philox
_PURPOSE = 1  # the counter word that keeps these seeds apart from token noise


class Seeds:
    """Seeds that follow from the engine's `seed` and from how many were given before."""

    def __init__(self, seed: int) -> None:
        self._key = seed & _WORD_MASK, seed >> _WORD_BITS
        self._count = 0

    def next(self) -> int:
        """A seed of 63 bits: it is not negative."""
        counter = self._count & _WORD_MASK, self._count >> _WORD_BITS, 0, _PURPOSE
        self._count += 1
        low, high, _, _ = philox4x32(counter, self._key)
        return (high >> 1) << _WORD_BITS | low
