"""A tokenizer that a thread loads is the one that `load` gives, and fails as that does."""

import shutil

import pytest

from tpdet import LLM, AsyncLLM
from tpdet.engine import Engine
from tpdet.errors import CheckpointError, NotFoundError
from tpdet.text.tokenizer import Tokenizer
from tpdet.text.tokenizer_ahead import TokenizerAhead


def test_it_is_the_same_tokenizer_each_time(tiny_model):
    folder = tiny_model()
    ahead = TokenizerAhead(folder)
    loaded = ahead.result()
    assert loaded is ahead.result()
    assert loaded.encode("so it is") == Tokenizer.load(folder).encode("so it is")


def test_what_loading_raises_is_raised_where_it_is_asked_for(tmp_path):
    with pytest.raises(NotFoundError, match=r"tokenizer\.json"):
        TokenizerAhead(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no model"):
        TokenizerAhead(tmp_path).result()


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_model_whose_tokenizer_cannot_be_read_leaves_no_engine(tiny_model, tmp_path, kind):
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    closed, close = [], Engine.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "close", lambda self: (closed.append(self), close(self)))
        with pytest.raises(CheckpointError, match="has no model"):
            kind(folder, kv_pages=4)
    assert len(closed) == 1
