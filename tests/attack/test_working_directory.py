"""No file of the working directory runs: of a model entered by `cd`, or of a shared /tmp."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.lib.server.served import Served
from tests.lib.tree import ROOT
from tpdet.launch.host.interpreter import python_command, python_environment

TPDET = Path(sys.executable).with_name("tpdet")
OTHERS = (
    "torch", "numpy", "triton", "tokenizers", "safetensors", "jinja2", "msgspec", "zmq", "uvloop",
    "httptools", "llguidance", "tqdm", "blake3", "tpdet", "kernels", "comm", "launch",
    "sitecustomize", "usercustomize", "tokenization_x", "modeling_x", "conftest", "setup",
)  # fmt: skip
PROGRAMS = (
    ("tpdet.serve", "--help"),
    ("tpdet.server.front.process",),
    ("tpdet.server.body.worker",),
    ("tpdet.server.commands.gpus",),
    ("tpdet.grammar.trial",),
    ("tpdet.launch.start.local_ranks", "2", "-c", "import json, queue"),
    ("tpdet.launch.life.shield", "true"),
    ("tpdet.kernels.cuda.compile.helper_process", "1"),
)
"""Programs that we start as children; without input they end at once."""


def shadow(folder):
    """Files in `folder` by the names of modules, each of which leaves a mark if it runs."""
    folder.mkdir(exist_ok=True)
    marks = folder.parent / "marks"
    marks.mkdir(exist_ok=True)
    for name in {*sys.stdlib_module_names, *OTHERS}:
        said = f"import {name} of the working directory"
        text = f"open({str(marks / name)!r}, 'w').close()\nraise RuntimeError({said!r})\n"
        (folder / f"{name}.py").write_text(text)
    return marks


def ran(marks):
    return sorted(path.name for path in marks.iterdir())


def start(command, folder, environment, **more):
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        **more,
    )


def plain_environment():
    """This process's, as a user has it: without what a guarded parent has set."""
    unset = ("PYTHONPATH", "PYTHONSAFEPATH")
    return {name: value for name, value in os.environ.items() if name not in unset}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program[0])
def test_no_program_that_we_start_runs_a_file_of_the_working_directory(tmp_path, program):
    folder = tmp_path / "model"
    marks = shadow(folder)
    done = start(python_command("-m", *program), folder, python_environment(plain_environment()))
    assert not ran(marks), (ran(marks), done.stderr)
    assert "of the working directory" not in done.stderr and "No module" not in done.stderr


def test_started_by_m_alone_such_a_file_does_run(tmp_path):
    """The control: without -P the same files are taken."""
    folder = tmp_path / "model"
    marks = shadow(folder)
    start([sys.executable, "-m", "tpdet.grammar.trial"], folder, plain_environment())
    assert ran(marks)


def test_the_environment_guards_children_of_children(tmp_path):
    folder = tmp_path / "model"
    marks = shadow(folder)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'tpdet.grammar.trial'])"
    start(python_command("-c", code), folder, python_environment(plain_environment()))
    assert not ran(marks)


def test_the_command_run_by_m_alone_imports_no_more_from_there(tmp_path):
    """What Python itself imports before us does come from there; only -P would prevent it."""
    folder = tmp_path / "model"
    marks = shadow(folder)
    for path in folder.iterdir():
        if path.stem not in ("argparse", "json", "decimal", "fractions", "logging", "torch"):
            path.unlink()
    done = start([sys.executable, "-m", "tpdet", "--version"], folder, plain_environment())
    assert done.returncode == 0 and not ran(marks), done.stderr


@pytest.mark.slow
def test_no_command_in_a_models_directory_runs_a_file_of_it(tiny_model, tmp_path):
    """Each command that starts processes, by its script, on a model with such files beside it."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3", kv_heads=2), folder)
    marks = shadow(folder)
    environment = plain_environment() | {"OMP_NUM_THREADS": "1"}
    short = ("--device", "cpu", "--max-model-len", "256")
    text, answers = tmp_path / "text", tmp_path / "answers"
    text.write_text("The for statement")
    commands = (
        ("generate", ".", "--prompt", "Hi", "--max-tokens", "2", "--json", *short),
        ("score", ".", text, *short),
        ("check", ".", answers, *short),
        ("verify", ".", "--device", "cpu", "--tp", "1,2", "--relations", "alone"),
        ("bench", "latency", ".", "--tp", "2", "--steps", "2", "--batch", "1", *short),
        ("plan", "--model", ".", "--gpu", "h200"),
    )
    for command in commands:
        done = start([TPDET, *map(str, command)], folder, environment)
        assert done.returncode == 0 and not ran(marks), (command, ran(marks), done.stderr)
        if command[0] == "generate":
            answers.write_text(done.stdout)
    served = Served(".", tmp_path, 2, *short, environment=environment, fresh=True, cwd=folder)
    try:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        shaped = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        served.client.completions.create(
            model="tiny", prompt="Hi", max_tokens=4, extra_body={"response_format": shaped}
        )
        with pytest.raises(openai.BadRequestError):  # by the process for large bodies
            served.client.completions.create(model="tiny", prompt="Hi " * 200_000)
    finally:
        code = served.end()
    assert code == 0 and not ran(marks)


def test_a_clone_that_is_not_installed_is_found_by_its_children(tmp_path):
    """From its root alone (`python -m tpdet`), by PYTHONPATH=., and beside another path."""
    code = (
        "from tpdet.launch.host.interpreter import python_environment as e; "
        "print(e().get('PYTHONPATH'))"
    )

    def listed(command, folder, **more):
        return start(command, folder, plain_environment() | more).stdout.strip()

    plain = [sys.executable, "-c", code]
    assert listed(plain, ROOT) == str(ROOT)
    assert listed(plain, ROOT, PYTHONPATH=".") == "."
    assert listed(plain, ROOT, PYTHONPATH="/nowhere") == f"/nowhere{os.pathsep}{ROOT}"
    assert listed(python_command("-c", code), ROOT) == "None"  # installed
