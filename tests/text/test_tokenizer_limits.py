"""Parts of a tokenizer.json that a library would prepare for seconds are refused at once."""

import json
import shutil
import time

import pytest

from tpdet.errors import CheckpointError
from tpdet.text.tokenizer import Tokenizer

SECONDS = 5.0  # of a busy machine
FUSE = {"type": "Fuse"}
FIRST = {"SpecialToken": {"id": "<s>", "type_id": 0}}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
PARTS = {
    "decoder": ({"type": "Sequence", "decoders": [FUSE] * 5000}, "decoder has over 1000 steps"),
    "post_processor": (
        {"type": "TemplateProcessing", "single": [FIRST] * 500_000, "pair": [],
         "special_tokens": {}},
        "post_processor has over 1000 steps",
    ),
    "pre_tokenizer": (
        SPLIT | {"pattern": {"Regex": f"(?i)({'|'.join('abcdefghij' * 5000)})"}},
        r"pre_tokenizer has an expression of \d+ characters, 16384 is the limit",
    ),
    "normalizer": (
        {"type": "Replace", "pattern": {"Regex": "(?i)" + "k" * 50_000}, "content": "x"},
        r"normalizer has an expression of 50004 characters, 16384 is the limit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_takes_seconds_is_refused_at_once(part, tokenizer_folder, tmp_path):
    value, message = PARTS[part]
    folder = shutil.copytree(tokenizer_folder, tmp_path / "model")
    description = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(description | {part: value}))
    began = time.process_time()
    with pytest.raises(CheckpointError, match=message) as refused:
        Tokenizer.load(folder)
    assert time.process_time() - began < SECONDS and len(str(refused.value)) <= 500
