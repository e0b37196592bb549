"""Cases in a process of their own: a failed one, and a program without any, fail the test."""

import json

import pytest

from tests.lib import case_runner
from tests.lib.case_runner import PASSED, assert_cases_pass, cases_of, run_cases


def case_that_passes():
    pass


def case_that_fails():
    raise ValueError("not these bits")


def test_every_case_is_told_by_its_name(capsys):
    found = cases_of(globals())
    assert found == [case_that_passes, case_that_fails]
    run_cases(found)
    results = json.loads(capsys.readouterr().out)
    assert results["case_that_passes"] == PASSED
    assert results["case_that_fails"].endswith("ValueError: not these bits\n")


@pytest.mark.parametrize("results", [{"a": PASSED, "b": "Traceback"}, {}])
def test_a_failed_case_and_no_case_fail_the_test(monkeypatch, results):
    monkeypatch.setattr(case_runner, "results_of", lambda module: results)
    with pytest.raises(AssertionError):
        assert_cases_pass("tests.no_such_program")


def test_a_program_that_dies_fails_the_test():
    with pytest.raises(AssertionError, match="No module named"):
        case_runner.results_of("tests.no_such_program")
