"""Runs the cases of a program that a test starts: the interpreter wants a process of its own."""

import json
import traceback
from collections.abc import Callable, Sequence


def print_failures(cases: Sequence[Callable[[], None]]) -> None:
    """Print one JSON line: for each case that failed its name and the end of its traceback."""
    failures = {}
    for case in cases:
        try:
            case()
        except Exception:
            failures[case.__name__] = traceback.format_exc()[-2000:]
    print(json.dumps(failures))
