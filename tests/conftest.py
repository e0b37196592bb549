"""Shared fixtures: tiny checkpoints and a tokenizer made once; which tests may run side by side."""

from pathlib import Path

import pytest

from tpdet.synthetic.make_model import make_model
from tpdet.synthetic.train_tokenizer import train_tokenizer
from tpdet.text.tokenizer import Tokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
HERE = Path(__file__).parent
ALONE = (
    *("server/", "attack/"),  # servers that are held to their times
    "accuracy/test_accuracy_lm_eval.py",
    # ranks in processes that must see a lost peer within a second or so
    *("comm/test_comm.py", "comm/test_nodes.py", "comm/test_mpi.py"),
)
LONGEST_FIRST = (
    "verify/test_verify.py", "kernels/compiled/test_peer.py", "kernels/compiled/test_draws.py",
    "engine/test_engine.py", "kernels/compiled/test_leaves.py", "kernels/compiled/test_decode.py",
    "kernels/compiled/test_attention.py", "scheduler/test_scheduler_machine.py",
    "launch/test_supervise.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Begin the long files. Servers are marked `alone`: `make test` runs them after the others."""
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}

    def place(item):
        return order.get(item.path.relative_to(HERE).as_posix(), len(order))

    for item in items:
        if item.path.relative_to(HERE).as_posix().startswith(ALONE):
            item.add_marker("alone")
    items.sort(key=place)


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
