"""The plugin of pytest: the fixture `golden`, `--tpdet-update`, and the names of unused goldens.

It is loaded by every run of pytest where tpdet is installed, so it imports nothing but pytest:
what asks and compares (`fixture.py`) is imported by the first test that uses the fixture.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tpdet.tools.golden.fixture import Golden

_PER_WORKER = "tpdet_golden"  # in what a worker of pytest-xdist sends at its end
_NAME_OF_NUMBER = " # "  # stands between a test's name and what tells its goldens apart


class GoldenUse:
    """What one process of pytest knows of goldens: which are used, by tests that ran."""

    def __init__(self, update: bool) -> None:
        self.update = update
        self.used_names: set[tuple[str, str]] = set()
        self.written: set[tuple[str, str]] = set()
        self.collected: set[str] = set()
        self.passed: set[str] = set()
        self._of_this_test: set[tuple[str, str]] = set()
        self._files: dict[Path, dict[str, Any]] = {}

    def begin_test(self) -> None:
        """Forget which goldens the test before has used."""
        self._of_this_test.clear()

    def was_used_by_this_test(self, path: Path, name: str) -> bool:
        """Whether the running test has asked for this golden already."""
        return (str(path), name) in self._of_this_test

    def used(self, path: Path, name: str) -> None:
        """Note that the running test has asked for a golden."""
        self.used_names.add((str(path), name))
        self._of_this_test.add((str(path), name))

    def goldens(self, path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The goldens of a file, which is read once."""
        if path not in self._files:
            self._files[path] = read(path)
        return self._files[path]

    def wrote(self, path: Path, name: str, stored: dict[str, Any]) -> None:
        """Note a golden that was written."""
        self.written.add((str(path), name))
        self._files.setdefault(path, {})[name] = stored

    def report(self) -> dict[str, list[Any]]:
        """What a worker sends to the process that sums up."""
        used, written = sorted(self.used_names), sorted(self.written)
        return {"used": used, "written": written, "collected": sorted(self.collected)}

    def add_report(self, report: dict[str, list[Any]]) -> None:
        """Take in what a worker sent."""
        self.used_names |= {(path, name) for path, name in report["used"]}
        self.written |= {(path, name) for path, name in report["written"]}
        self.collected |= {*report["collected"]}


_USE = pytest.StashKey[GoldenUse]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tpdet-update`."""
    parser.getgroup("tpdet", "golden answers (tpdet)").addoption(
        "--tpdet-update",
        action="store_true",
        help="write goldens that are missing or differ, and delete those that no test uses",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin to note goldens."""
    config.stash[_USE] = GoldenUse(config.getoption("tpdet_update"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Hold an answer of an LLM or a server to the recorded one, bit for bit.

    `answer = golden(llm_or_url, prompt_or_messages, **params)`; `pytest --tpdet-update` records.
    """
    from tpdet.tools.golden.fixture import Golden

    use = request.config.stash[_USE]
    use.begin_test()
    return Golden(use, request.path, request.node.nodeid.partition("::")[2])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note every test that is there, before some are deselected."""
    config.stash[_USE].collected |= {item.nodeid for item in items}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Mark the report of a golden that cannot be compared: it is an error, not a failure."""
    report: Any = yield
    error = None if call.excinfo is None else call.excinfo.value
    if hasattr(error, "golden_cannot_be_compared"):
        report.golden_cannot_be_compared = True
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any) -> Any:
    """Such a report counts, and is shown, as an error."""
    if report.failed and getattr(report, "golden_cannot_be_compared", False):
        return "error", "E", ("ERROR", {"red": True})
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take in what a worker of pytest-xdist noted."""
    report = getattr(node, "workeroutput", {}).get(_PER_WORKER)
    if report:
        node.config.stash[_USE].add_report(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker sends what it noted."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_PER_WORKER] = session.config.stash[_USE].report()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the goldens that were written, and those that nothing uses; an update deletes these."""
    use = config.stash[_USE]
    passed = {report.nodeid for report in terminalreporter.stats.get("passed", ())}
    unused = _unused(config, use, passed)
    if not unused and not use.written:
        return
    terminalreporter.section("golden answers")
    for path, names in _by_file(use.written).items():
        terminalreporter.line(f"{len(names)} written to {path}: {', '.join(names)}")
    for path, names in _by_file(unused).items():
        if use.update:
            from tpdet.tools.golden.golden_file import write_goldens

            write_goldens(Path(path), dict.fromkeys(names))
        state = "unused, deleted from" if use.update else "unused in"
        terminalreporter.line(f"{len(names)} {state} {path}: {', '.join(names)}")
    if unused and not use.update:
        terminalreporter.line("delete them: pytest --tpdet-update")


def _unused(config: pytest.Config, use: GoldenUse, passed: set[str]) -> set[tuple[str, str]]:
    """(file, name) of goldens that no test can use, or that a test passed without.

    A module of which some tests were not collected (`pytest FILE::TEST`, --lf) tells nothing of
    the tests that are not there.
    """
    modules = {nodeid.partition("::")[0] for nodeid in use.collected}
    files = {config.rootpath / module: module for module in modules}
    parts = [argument.partition("::")[0] for argument in config.args if "::" in argument]
    partly = {(config.invocation_params.dir / part).resolve() for part in parts}
    unused = set()
    for path, module in files.items():
        file = path.parent / "__golden__" / f"{path.stem}.json"
        if not file.exists():
            continue
        from tpdet.errors import TpdetError
        from tpdet.tools.golden.golden_file import read_goldens

        try:
            names = [*read_goldens(file)]
        except TpdetError:
            continue  # the tests that use it say so
        whole = path.resolve() not in partly and not getattr(config.option, "lf", False)
        for name in names:
            test = f"{module}::{name.partition(_NAME_OF_NUMBER)[0]}"
            is_over = test in passed if test in use.collected else whole
            if is_over and (str(file), name) not in use.used_names:
                unused.add((str(file), name))
    return unused


def _by_file(names: set[tuple[str, str]]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for path, name in sorted(names):
        files.setdefault(path, []).append(name)
    return files
