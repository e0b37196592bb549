"""Shared fixtures: tiny checkpoints and a tokenizer made once; which files of tests begin."""

import gc
import signal

import pytest

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
# Ctrl-C is ignored by what a shell starts in its background, and by all that is started from there.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until all tests are imported: what is imported stays


def pytest_collection_modifyitems(items):
    """Begin with the long files."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    gc.enable()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A function that makes (once) and returns the directory of a tiny model."""
    made = {}
    root = tmp_path_factory.mktemp("models")

    def make(like="qwen3", **options):
        key = repr((like, sorted(options.items(), key=str)))
        if key not in made:
            settings = {"hidden": 256, "layers": 2, "intermediate": 384, "vocab": 1100} | options
            made[key] = make_model(root / f"{like}-{len(made)}", like=like, **settings)
        return made[key]

    return make


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
