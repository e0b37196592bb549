"""The HTTP process stays light: no torch, whose import would take seconds and gigabytes."""

import subprocess
import sys

from tests.lib.tree import ROOT


def test_the_http_process_imports_no_torch():
    code = "import tpdet.server.front.process, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
