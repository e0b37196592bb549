"""The tables of the documents are those of the results files."""

import subprocess
import sys

from tests.lib.tree import ROOT


def test_the_tables_are_those_of_the_results_files():
    done = subprocess.run([sys.executable, "scripts/result_tables.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run: python scripts/result_tables.py"


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []
