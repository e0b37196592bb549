""" "Did you mean": the nearest of the names there are, for messages about unknown ones."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`; None where none comes near.

    Case, hyphens and underscores do not count.
    """
    plain = {_plain(other): other for other in known}
    found = get_close_matches(_plain(name), plain, n=1, cutoff=0.7)
    return plain[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Text to put behind an unknown name: ": did you mean 'temperature'?", or nothing."""
    found = nearest(name, known)
    return "" if found is None else f": did you mean {found!r}?"


def _plain(name: str) -> str:
    return name.casefold().replace("-", "_")
