"""The README proves itself: its tables are the results files', its commands exist."""

import re
import subprocess
import sys

from tests.lib.tree import ROOT


def test_the_tables_are_those_of_the_results_files():
    done = subprocess.run([sys.executable, "scripts/readme_tables.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run: python scripts/readme_tables.py"


def test_every_target_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_file_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"\((docs/[\w./]+)\)", text):
        assert (ROOT / name).exists(), name
