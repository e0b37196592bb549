"""A start names the bytecode that Python does not keep."""

import importlib
import sys

import pytest

from tpdet.launch.host.interpreter import missing_bytecode


@pytest.fixture
def imported(monkeypatch, tmp_path):
    """Imports a new module anew, as often as it is called; its name."""
    (tmp_path / "to_import.py").write_text("number = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)

    def again():
        monkeypatch.delitem(sys.modules, "to_import", raising=False)
        return importlib.import_module("to_import").__name__

    yield again
    monkeypatch.delitem(sys.modules, "to_import", raising=False)


def test_kept_bytecode_is_not_worth_a_word(imported, monkeypatch):
    assert missing_bytecode(imported()) is None
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert missing_bytecode(imported()) is None  # an earlier process wrote it


def test_bytecode_that_is_not_written_is_named_with_the_reason(imported, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    said = missing_bytecode(imported())
    assert "of to_import (PYTHONDONTWRITEBYTECODE is set)" in said
    assert f"-m compileall -q {tmp_path.parent} once" in said
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", "/dev/null/nowhere")
    assert "of to_import (its folder cannot be written)" in missing_bytecode(imported())


def test_a_module_without_sources_has_nothing_to_compile():
    assert missing_bytecode("sys") is None
