"""schemathesis on the published schema, valid bodies and invalid ones: nothing but what it says."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack.conftest import KEYS
from tests.lib.server.harness import Server

PROGRAM = shutil.which("schemathesis", path=Path(sys.executable).parent) or shutil.which(
    "schemathesis"
)
# A schema cannot say that prompt and max_tokens together fit the context, so what it allows may
# still be refused.
LEFT_OUT = "positive_data_acceptance"


@pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not installed")
@pytest.mark.parametrize(
    ("guarded", "phases", "examples"),
    [
        (True, "fuzzing", "3"),
        pytest.param(False, "coverage,fuzzing", "60", marks=pytest.mark.slow),
        pytest.param(True, "coverage,fuzzing", "30", marks=pytest.mark.slow),
    ],
)
def test_schemathesis_finds_nothing(tmp_path, guarded, phases, examples):
    keys = tmp_path / "keys"
    keys.write_text(KEYS[0] + "\n")
    keys.chmod(0o600)
    server = Server(tmp_path, *(["--api-key-file", str(keys)] if guarded else []))
    flags = ["--header", f"Authorization: Bearer {KEYS[0]}"] if guarded else []
    try:
        found = subprocess.run(
            [
                str(PROGRAM),
                "run",
                server.url + "/openapi.json",
                *flags,
                "--seed",
                "2",
                "--phases",
                phases,
                "--max-examples",
                examples,
                "--generation-deterministic",
                "--continue-on-failure",
                "--exclude-checks",
                LEFT_OUT,
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
        assert server.child.is_running()
        assert " 500 " not in server.log.read_text()
    finally:
        assert server.stop() == 0
