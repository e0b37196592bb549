"""Shared fixtures: tiny checkpoints and a tokenizer made once; which tests may run side by side."""

from pathlib import Path

import pytest

from tpdet.synthetic.make_model import make_model
from tpdet.synthetic.train_tokenizer import train_tokenizer
from tpdet.text.tokenizer import Tokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
HERE = Path(__file__).parent
ALONE = (
    *("server", "attack"),  # servers that are held to their times
    *("test_accuracy_lm_eval.py", "test_launch.py", "test_comm.py", "test_nodes.py", "test_mpi.py"),
)  # the last four: ranks in processes that must see a lost peer within a second or so
LONGEST_FIRST = (
    "test_verify.py", "test_triton_peer.py", "test_triton_draws.py", "test_engine.py",
    "test_triton_leaves.py", "test_triton_decode.py", "test_triton_attention.py",
    "test_scheduler_machine.py", "test_supervise.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Begin the long files. Servers are marked `alone`: `make test` runs them after the others."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).parts[0] in ALONE:
            item.add_marker("alone")
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


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
