"""The tokenizer that is trained for made models."""

import os
import subprocess
import sys

import pytest
import transformers

from tpdet.errors import UsageError
from tpdet.text.tokenizer import Tokenizer
from tpdet.tools.synthetic.train_tokenizer import train_tokenizer


@pytest.mark.parametrize("size", [1024, 1031, 8192])
def test_a_trained_vocabulary_has_exactly_the_size_asked_for(tmp_path, size):
    ids = train_tokenizer(str(tmp_path / "new"), size)
    tokenizer = Tokenizer.load(tmp_path / "new")
    assert tokenizer.vocab_size == size
    assert all(tokenizer.token(i) is not None for i in range(size))
    assert ids == {"bos_token_id": size - 3, "eos_token_id": size - 1, "pad_token_id": size - 3}
    assert tokenizer.eos_token_ids == (ids["eos_token_id"],)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "new").eos_token_id == size - 1


def test_a_vocabulary_too_small_or_beyond_the_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match="1023: use at least 1024"):
        train_tokenizer(tmp_path, 1023)
    with pytest.raises(UsageError, match=r"500000: the text to train on supports \d+"):
        train_tokenizer(tmp_path, 500_000)
    assert not any(tmp_path.iterdir())


def test_another_process_trains_the_same_bytes(tokenizer_folder, tmp_path):
    module = "tpdet.tools.synthetic.train_tokenizer"
    code = f"import sys; from {module} import train_tokenizer; train_tokenizer(sys.argv[1], 1500)"
    environment = os.environ | {"PYTHONHASHSEED": "11", "RAYON_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (tokenizer_folder / name).read_bytes()
