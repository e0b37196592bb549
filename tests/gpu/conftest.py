"""The rows of GPU suites: `--results` appends them to a results file."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu.lib.suite import fork_from_imported, side_by_side
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine

_WORKERS = 10  # checks that run at once


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, help="results file or folder to append rows to")


@pytest.fixture(scope="session")
def rows_of(request, tmp_path_factory):
    """A function of a suite and a check's name: the check's row. All that are selected start here.

    The rows of each suite, in the order of its checks, are appended to `--results` at the end.
    """
    if not torch.cuda.is_available():
        pytest.fail("no GPU here: these checks need one", pytrace=False)
    from tests.gpu.test_bits import SUITES, prepare

    chosen = dict.fromkeys(item.callspec.id for item in request.session.items if _is_check(item))
    folder = prepare(tmp_path_factory.mktemp("models"), chosen)
    listed = {
        f"{name}: {check.name}": check for name, suite in SUITES.items() for check in suite(folder)
    }
    fork_from_imported()
    with ThreadPoolExecutor(_WORKERS) as threads:
        rows = dict(zip(chosen, side_by_side([listed[c] for c in chosen], threads), strict=True))
        yield lambda name: rows[name].result()
    if path := request.config.getoption("--results"):
        record(path, {name: row.result() for name, row in rows.items()})


def _is_check(item):
    return item.originalname == "test_a_check_of_bits"


def record(path, rows):
    """One run a suite, its rows named `suite: check`."""
    for suite in dict.fromkeys(name.split(":")[0] for name in rows):
        tagged = [
            row | {"case": name} for name, row in rows.items() if name.startswith(f"{suite}:")
        ]
        command = f"pytest -m gpu tests/gpu -k {suite}"
        append_run(path, "bits", machine("cuda", 1), command, tagged)
