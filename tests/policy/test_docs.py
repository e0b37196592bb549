"""What the documents say of the tree: files, modules, commands and make targets they name exist.
What the planner says of its figures: the files they come from exist, and go as far as it notes.

Not looked at: `docs/journal.md`, which is dated, and `docs/results.md`, whose tables quote the
commands that gave them, as they were then. Numbers are not checked here.
"""

import json
import re
import shlex
from functools import cache

import pytest

from tests.lib.tree import ROOT
from tpdet import cli
from tpdet.errors import UsageError
from tpdet.server.settings.settings import make_parser
from tpdet.tools.bench.arguments import complete
from tpdet.tools.plan.plan import MEASURED_GPUS

OF_THEIR_TIME = ("journal.md", "results.md")
DOCUMENTS = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in OF_THEIR_TIME),
]
FILE = re.compile(r"`(\w[\w./-]*\.(?:py|md|json|sh|toml|svg|css|sbatch|ya?ml))`")
LINK = re.compile(r"\]\(((?!\w+:)[^)#\s]+)")
MODULE = re.compile(r"\b(?:tests|tpdet|scripts)(?:\.[a-z]\w*)+\b")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
COMMAND = re.compile(r"(?:^\s*(?:\$ )?|`)tpdet ([a-z][\w-]*)", re.MULTILINE)
EXAMPLE = re.compile(r"^(?:    |\$ )?tpdet (\w.*)$", re.MULTILINE)
BLOCK = re.compile(r"```console\n(.*?)```|((?:^    [^\n]*\n)+)", re.DOTALL | re.MULTILINE)
FORM = re.compile(r"\[|\.\.\.|\|")
"""A command's form, with what may be left out, is no example."""
TARGET = re.compile(r"(?:^\s*|`)make ([\w-]+)", re.MULTILINE)
OF_MODELS_AND_RUNS = {
    *("config.json", "tokenizer.json", "ready.json", "exit.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "keys.json"),
    *("modules.json", "sentence_bert_config.json"),
    "chat_template.json",
}
"""Files of a checkpoint or of a run directory, which no clone has."""


@cache
def tree():
    """Every file of the clone that a document may name, by its name alone."""
    tops = ("tpdet", "kernels", "comm", "launch", "tests", "scripts", "docs", "configs", "deploy")
    return {path.name for top in tops for path in (ROOT / top).rglob("*.*")}


def there(name):
    """Whether a document may name this file: from the root, from `tpdet`, or by its name alone."""
    if "/" in name:
        return any((ROOT / top / name).exists() for top in (".", "tpdet", "docs"))
    return name in tree() or (ROOT / name).exists()


def is_module(name):
    """Whether a dotted name is a module, or something that a module defines."""
    for path in (ROOT.joinpath(*name.split(".")), ROOT.joinpath(*name.split(".")[:-1])):
        if path.is_dir() or path.with_suffix(".py").exists():
            return True
    return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document):
    text = document.read_text()
    code = "\n".join(CODE.findall(text))
    files = {name for name in FILE.findall(text) if name.split("/")[-1] not in OF_MODELS_AND_RUNS}
    missing = [f"no file {name}" for name in files if not there(name)]
    links = {*LINK.findall(text)}
    missing += [f"no file {name}" for name in links if not (document.parent / name).exists()]
    missing += [f"no module {name}" for name in {*MODULE.findall(text)} if not is_module(name)]
    commands = {*re.findall(r"^  tpdet ([a-z-]+)", cli.OVERVIEW, re.MULTILINE)}
    missing += [f"no command tpdet {name}" for name in {*COMMAND.findall(code)} - commands]
    targets = {*re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    missing += [f"no target {name}" for name in {*TARGET.findall(code)} - targets]
    assert not missing, "\n".join(sorted(missing))


def examples(text):
    """The arguments of each `tpdet ...` in a block of code, without comment and redirection."""
    blocks = "\n".join(first or second for first, second in BLOCK.findall(text))
    lines = [re.split(r"\s+#\s|\s+>\s", line)[0] for line in EXAMPLE.findall(blocks)]
    return [shlex.split(line) for line in lines if not FORM.search(line)]


def parse(arguments):
    """Read a command's flags as it does. Raises UsageError."""
    if arguments[0] == "serve":
        make_parser("tpdet serve").parse_args(arguments[1:])
    elif arguments[0] != "launch":
        cli.command_parser().parse_args(complete(arguments))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_of_a_document_can_be_given(document):
    for arguments in examples(document.read_text()):
        parse(arguments)


def test_a_flag_that_is_not_there_is_found():
    text = "    tpdet bench drafts M --casess text   # words\n\n```console\n$ tpdet stop D\n```\n"
    found = examples(text + "\n    tpdet stop RUN_DIR [--timeout SECONDS]\n")
    assert sorted(found) == [["bench", "drafts", "M", "--casess", "text"], ["stop", "D"]]
    with pytest.raises(UsageError, match="--casess"):
        parse(found[0])
    parse(found[1])
    assert sum(len(examples(document.read_text())) for document in DOCUMENTS) > 40


def test_a_name_that_is_not_there_is_found():
    assert there("kernels/ops.py") and there("README.md") and there("exchange_time.py")
    assert not there("kernels/nothing.py") and not there("nothing.py")
    assert is_module("tpdet.serve") and is_module("tpdet.launch.submit")
    assert is_module("scripts.gpu_times.kernels.sustained")
    assert not is_module("tests.nothing.sustained")
    assert COMMAND.findall("`tpdet frobnicate x`\n    tpdet serve M") == ["frobnicate", "serve"]
    assert TARGET.findall("`make tea`\nmake test") == ["tea", "test"]


def test_the_planner_names_the_files_of_its_constants_and_how_far_they_go():
    constants = json.loads((ROOT / "tpdet/tools/plan/constants/h200.json").read_text())
    assert constants["sources"] and all(there(each["file"]) for each in constants["sources"])
    runs = json.loads((ROOT / "docs/results/allreduce.h200.json").read_text())
    assert max(run["gpus"] for run in runs) == MEASURED_GPUS
