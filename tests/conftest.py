"""Shared fixtures: tiny checkpoints and a tokenizer made once; which files of tests begin."""

import atexit
import gc
import os
import signal
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from tpdet.runner.start import kernel_checks
from tpdet.text.tokenizer import Tokenizer
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.synthetic.train_tokenizer import train_tokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DATA_FAMILIES = (
    *("ministral3", "smollm3", "granite", "seed_oss", "phi3", "glm", "glm4", "olmo3"),
    *("gemma2", "gemma3_text", "starcoder2", "qwen3_moe", "mixtral"),
    *("gpt_oss", "glm4_moe"),
)
"""Families that differ from those above in data, not in code."""
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Families of linear and full attention."""
# Ctrl-C is ignored by what a shell starts in its background, and by all that is started from there.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until all tests are imported: what is imported stays


def pytest_collection_modifyitems(items):
    """Begin with the long files."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    gc.freeze()  # tests collect garbage, of which there is none among what is imported
    atexit.register(gc.unfreeze)
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Say how many tests were skipped, and each by its name: what is absent is never silent."""
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(f"tests skipped: {len(skipped)}")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        said = str(reason).removeprefix("Skipped: ")[:200]
        terminalreporter.write_line(f"SKIPPED {report.nodeid}: {said}")


@pytest.fixture(scope="session", autouse=True)
def known_answers_once():
    """Engines of this process compare what was computed once, and check a product once."""
    architecture, classes = kernel_checks.architecture, cache(kernel_checks.check_bit_classes)
    named = cache(lambda device, answers: architecture(device, dict(answers)))
    once = ("known_answers", "golden_digest", "expert_golden_digest", "linear_golden_digest")
    with mock.patch.multiple(
        kernel_checks,
        architecture=lambda device, answers: named(device, (*answers.items(),)),
        check_bit_classes=lambda reduced, head_dim: classes((*sorted({*reduced}),), head_dim),
        **{name: cache(getattr(kernel_checks, name)) for name in once},
    ):
        yield


class TinyModels:
    """Tiny models, each made once; every test of this process reads the same folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Path] = {}
        self._files: dict[Path, dict[str, tuple[int, int]]] = {}

    def __call__(self, like: str = "qwen3", **options) -> Path:
        key = repr((like, sorted(options.items(), key=str)))
        if key not in self._made:
            settings = {"hidden": 256, "layers": 2, "intermediate": 384, "vocab": 1100} | options
            folder = make_model(self._root / f"{like}-{len(self._made)}", like=like, **settings)
            self._made[key], self._files[folder] = folder, _file_times(folder)
        return self._made[key]

    def changed(self) -> list[Path]:
        """The folders whose files are no longer those that were made."""
        return [folder for folder, files in self._files.items() if _file_times(folder) != files]


def _file_times(folder: Path) -> dict[str, tuple[int, int]]:
    found = {entry.name: entry.stat() for entry in os.scandir(folder)}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A function that makes (once) and returns the directory of a tiny model."""
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def shared_models_stay(request):
    """Fail the test that changes a folder that others read: a copy is its own."""
    shared = "tiny_model" in request.fixturenames and request.getfixturevalue("tiny_model")
    yield
    if shared:
        assert not shared.changed(), f"copy the model before writing in it: {shared.changed()}"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A trained tokenizer of 1,500 tokens; to be read only."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(folder, 1500)
    return folder


@pytest.fixture(scope="session")
def our_tokenizer(tokenizer_folder):
    """The trained tokenizer, as the server loads it."""
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture(scope="session")
def their_tokenizer(tokenizer_folder):
    """The trained tokenizer, as transformers loads it."""
    from transformers import PreTrainedTokenizerFast  # seconds that few tests need

    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)


@pytest.fixture
def tpdet(capsys):
    """A function that runs a command here: its exit code and what it printed."""

    from tpdet.cli import main

    def run(*arguments):
        code = main([*map(str, arguments)])
        found = capsys.readouterr()
        return code, found.out, found.err

    return run
