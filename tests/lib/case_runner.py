"""Cases that want a process of their own: the program that runs them, and the test that starts it.

Triton decides when it is imported whether it interprets kernels or compiles them, so one process
cannot do both.
"""

import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable

from tests.lib.tree import ROOT

PASSED = "passed"


def cases_of(names: dict) -> list[Callable[[], None]]:
    """The functions `case_...` among a program's globals."""
    functions = filter(inspect.isfunction, names.values())
    return [function for function in functions if function.__name__.startswith("case_")]


def run_cases(cases: Iterable[Callable[[], None]]) -> None:
    """Print one JSON line: each case by its name, with PASSED or the end of its traceback."""
    results = {}
    for case in cases:
        try:
            case()
            results[case.__name__] = PASSED
        except Exception:
            results[case.__name__] = traceback.format_exc()[-2000:]
    print(json.dumps(results))


def results_of(module: str, *arguments: str) -> dict[str, str]:
    """What `run_cases` printed in `python -m module`, started with Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_cases_pass(module: str) -> None:
    results = results_of(module)
    failed = {name: why for name, why in results.items() if why != PASSED}
    assert results and not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
