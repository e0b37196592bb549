"""Parameters of which `make test` takes some: the whole matrix is for `make test-long`."""

from collections.abc import Iterable

import pytest


def some_slow(quick: Iterable, cases: Iterable) -> list:
    """The cases as parameters; those that are not `quick` are marked slow.

    A case is the value of one parameter or a tuple of several's. Raises ValueError for a quick one
    that is no case.
    """
    quick, cases = list(quick), list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"no cases: {unknown}")
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
