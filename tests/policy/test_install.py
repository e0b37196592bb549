"""Installs of a copy of the tree (editable, wheel, sdist), used from other folders."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
import zipfile

import pytest

from tests.lib.tree import ROOT

PACKAGES = ("tpdet", "kernels", "comm", "launch")
BESIDE = ("pyproject.toml", "README.md", "LICENSE")
SCRIPT = "import tpdet\nfrom tpdet import LLM, SamplingParams\nprint(tpdet.__file__)\n"


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A folder with a clone named tpdet in it, which holds models/ as after `make serve`."""
    folder = tmp_path_factory.mktemp("parent")
    clone = folder / "tpdet"
    clone.mkdir()
    for name in PACKAGES:
        no_bytecode = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=no_bytecode)
    for name in BESIDE:
        shutil.copy(ROOT / name, clone / name)
    (clone / "models" / "demo").mkdir(parents=True)
    (folder / "script.py").write_text(SCRIPT)
    return folder


class Place:
    """A virtual environment that sees this one's packages, but not this one's tpdet."""

    def __init__(self, folder):
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.packages = next((folder / "lib").glob("python*/site-packages"))
        # A plain path: the .pth files in it, such as that of this tree's own install, are not read.
        (self.packages / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        self.environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH",)
        }

    def install(self, *what):
        """pip install, with no network: dependencies and setuptools are there already."""
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet"]
        command += ["--no-index", "--no-deps", "--no-build-isolation", *what]
        subprocess.run(command, check=True, env=self.environment)

    def output(self, *command, cwd):
        """The standard output of `python COMMAND` in a folder."""
        done = subprocess.run(
            [self.python, *command],
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def editable(parent, tmp_path_factory):
    """`pip install -e .` as typed by hand."""
    place = Place(tmp_path_factory.mktemp("editable"))
    place.install("--editable", parent / "tpdet")
    return place


def test_an_editable_install_is_a_plain_path(parent, editable):
    (written,) = editable.packages.glob("__editable__*")
    assert written.suffix == ".pth"
    assert written.read_text().strip() == str(parent / "tpdet")


@pytest.mark.parametrize(
    "command",
    [
        ["-c", SCRIPT],
        ["script.py"],
        ["-m", "torch.distributed.run", "--nproc-per-node", "1", "script.py"],
    ],
    ids=["command", "script", "torchrun"],
)
def test_an_editable_install_is_imported_from_the_parent_of_the_clone(parent, editable, command):
    package = parent / "tpdet" / "tpdet"
    assert editable.output(*command, cwd=parent) == str(package / "__init__.py")


def test_the_command_and_the_module_run_from_the_parent_of_the_clone(parent, editable):
    entry = editable.python.parent / "tpdet"
    for command in (["-m", "tpdet"], [entry]):
        assert "--fold-order" in editable.output(*command, "verify", "--help", cwd=parent)


@pytest.fixture(scope="module")
def built(parent, tmp_path_factory):
    """The wheel of the tree, and the sdist."""
    folder = tmp_path_factory.mktemp("built")
    code = (
        "import sys; from setuptools import build_meta as b; _, to = sys.argv; "
        "b.build_wheel(to); b.build_sdist(to)"
    )
    clone = parent / "tpdet"
    # A copy: a build leaves folders in the tree that it is made of.
    copy = folder / "source"
    shutil.copytree(clone, copy, symlinks=True)
    command = [sys.executable, "-c", code, folder]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, text=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def of_the_sdist(built, tmp_path_factory):
    """A wheel made of the sdist."""
    folder = tmp_path_factory.mktemp("of-the-sdist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--no-build-isolation", "--wheel-dir", folder, built[1]], check=True)
    return next(folder.glob("*.whl"))


def files_of_the_tree():
    """Every file of the packages, as an install names it."""
    links = [ROOT / "tpdet" / name for name in PACKAGES[1:]]
    names = set()
    for top in PACKAGES:
        for path in (ROOT / top).rglob("*"):
            if path.is_dir() or "__pycache__" in path.parts or path.suffix == ".pyc":
                continue
            if any(link in (path, *path.parents) for link in links):
                continue
            inside = path.relative_to(ROOT).as_posix()
            names.add(inside if top == "tpdet" else f"tpdet/{inside}")
    return names


def test_the_wheel_and_that_of_the_sdist_hold_every_file_of_the_tree(built, of_the_sdist):
    expected = files_of_the_tree()
    assert len(expected) > 200
    for wheel in (built[0], of_the_sdist):
        held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        assert held == expected, sorted(held ^ expected)


OFFLINE = """
import sys, tpdet
from tpdet import LLM, SamplingParams
llm = LLM(model=sys.argv[1], max_model_len=128, kv_pages=16, device="cpu")
(output,) = llm.generate(["The for statement"], SamplingParams(temperature=0, max_tokens=4))
llm.close()
assert len(output.outputs[0].token_ids) == 4
print(tpdet.__file__)
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_serves(kind, built, of_the_sdist, tmp_path, tiny_model):
    place = Place(tmp_path / "env")
    place.install(built[0] if kind == "wheel" else of_the_sdist)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "offline.py").write_text(OFFLINE)
    model = tiny_model()
    said = place.output("offline.py", model, cwd=elsewhere)
    assert said.endswith(str(place.packages / "tpdet" / "__init__.py"))
    assert "completion" in ask_a_server(place, model, elsewhere)["object"]


def ask_a_server(place, model, folder):
    """One completion of `tpdet serve`, started and drained in a folder."""
    run = folder / "run"
    command = [place.python.parent / "tpdet", "serve", model, "--tp", "2", "--run-dir", run]
    command += ["--port", "0", "--max-model-len", "128", "--served-model-name", "tiny"]
    process = subprocess.Popen(command, cwd=folder, env=place.environment)
    try:
        deadline = time.monotonic() + 120
        while not (run / "ready.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        url = json.loads((run / "ready.json").read_text())["url"]
        body = json.dumps({"model": "tiny", "prompt": "The for", "max_tokens": 4}).encode()
        request = urllib.request.Request(
            f"{url}/v1/completions", body, {"content-type": "application/json"}
        )
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        return answer
    finally:
        process.kill()
        process.wait()
