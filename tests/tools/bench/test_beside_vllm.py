"""`scripts/beside_vllm.sh` by stand-ins for both interpreters, which tell what they were asked."""

import os
import subprocess

import pytest

from tests.lib.tree import ROOT

STAND_IN = """#!/usr/bin/env bash
[ "$1" = -c ] && exit 0  # the server answers
echo "${0##*/} $*" >> "$TOLD"
case "$*" in
*"$BROKEN"*) exit 3 ;;
*serve\\ *) echo $$ >> "$SERVERS"; exec sleep 60 ;;
*bench\\ peer*)  # not before both servers are there: they are stopped behind it
    both=$((2 * $(grep -c "bench peer" "$TOLD")))
    until [ "$(wc -l < "$SERVERS")" -ge $both ]; do sleep 0.05; done ;;
esac
"""


@pytest.mark.parametrize("broken", ["nothing", "bench generate {model} --tp 4"])
def test_each_size_is_timed_offline_and_by_http(tmp_path, broken):
    """What fails at one size does not keep the next one from its turn; no server is left behind."""
    model, told, servers = tmp_path / "model", tmp_path / "told", tmp_path / "servers"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).touch()
    for name in ("python3", "vllm-python"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TOLD": str(told),
        "SERVERS": str(servers),
        "BROKEN": broken.format(model=model),
        "VLLM_PYTHON": str(tmp_path / "vllm-python"),
        "LOAD_FORMAT": "dummy",
    }
    command = [ROOT / "scripts" / "beside_vllm.sh", model, "4 8", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == (broken != "nothing"), done.stderr
    lines = told.read_text().splitlines()
    expected = [
        (who, what, size)
        for size in ("4", "8")
        for who, what in (
            ("vllm-python", "scripts/vllm_generate.py"),
            ("python3", "tpdet bench generate"),
            ("python3", "tpdet serve"),
            ("vllm-python", "cli.main serve"),
            ("python3", "tpdet bench peer"),
        )
    ]
    for who, what, size in expected:  # in any order: servers are in the background
        of_it = [line for line in lines if line.startswith(f"{who} ") and f" {size} " in line]
        assert sum(what in line for line in of_it) == 1, (what, size, lines)
    assert len(lines) == len(expected), lines
    for line in servers.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line), 0)


def test_it_says_how_it_is_called():
    done = subprocess.run([ROOT / "scripts" / "beside_vllm.sh"], capture_output=True, text=True)
    assert done.returncode == 2 and "SIZES" in done.stderr
