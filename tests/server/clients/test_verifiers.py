"""The client of verifiers, as prime-rl trains with it, unmodified against a served model.

`TPDET_TEST_VERIFIERS` names the Python of an environment of its own, for these packages want other
versions than the tests have: `python -m venv DIR`, then
`DIR/bin/pip install verifiers==0.4.0 renderers==0.1.12` (570 MB; there is no torch in it).
"""

import json
import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import tpdet.nn
from tests.lib.server.harness import write_tokenizer
from tests.lib.server.served import Served

PYTHON = os.environ.get("TPDET_TEST_VERIFIERS")
FILES = [
    "c1ce01f4f2283a9075eaedfaefa009de20b7176594dabe2aab010b6e8e4dc617",
    "5156102bd03f7e6a7cda8d6b843ded9d820f2bfdf237e9ab9693b9db2c71c815",
]
"""SHA-256 of verifiers/v1/clients/train.py of 0.4.0, and of renderers/client.py of 0.1.12."""
MARKS = "think", "tool_call", "tool_response"
"""What Qwen3's renderer wants its tokenizer to have, each as a beginning and an end."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="TPDET_TEST_VERIFIERS names no Python"),
]


def with_tokenizer(model, folder):
    """A copy of a model whose tokenizer has bytes and the marks of Qwen3."""
    shutil.copytree(model, folder)
    write_tokenizer(
        folder.parent / "bytes", marks=[f"<{s}{mark}>" for mark in MARKS for s in ("", "/")]
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder.parent / "bytes" / name, folder / name)
    return folder


def equal_bits(model, turns):
    """How many log-probabilities `tpdet.nn` computes again to the bit, and of how many."""
    sequences = [turn["prompt"] + turn["completion"] for turn in turns]
    lengths = [len(sequence) for sequence in sequences]
    ids = [token for sequence in sequences for token in sequence]
    with torch.no_grad():
        scores = tpdet.nn.load(model, device="cpu").log_prob(ids, lengths)
    parts = scores.split([length - 1 for length in lengths])
    ours = torch.cat(
        [part[-len(turn["completion"]) :] for part, turn in zip(parts, turns, strict=True)]
    )
    theirs = torch.tensor([value for turn in turns for value in turn["logprobs"]])
    return int((ours.view(torch.int32) == theirs.view(torch.int32)).sum()), len(theirs)


def test_its_rollouts_get_bits_that_are_computed_again(tiny_model, tmp_path):
    model = with_tokenizer(tiny_model("qwen3"), tmp_path / "model")
    server = Served(model, tmp_path, 1)
    try:
        program = str(Path(__file__).with_name("verifiers_run.py"))
        done = subprocess.run(
            [PYTHON, "-P", program, server.ready["url"], str(model)],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    finally:
        server.end()
    seen = json.loads(done.stdout.splitlines()[-1])
    first, again = seen["runs"]
    assert seen["files"] == FILES and first == again and len(first) == 8
    for turns in first:  # later turns go on with the very ids of those before
        assert [turn["bridged"] for turn in turns] == [False, True, True]
        for turn, after in pairwise(turns):
            ids = turn["prompt"] + turn["completion"]
            assert after["prompt"][: len(ids)] == ids
        assert turns[-1]["branch"] == turns[-1]["prompt"] + turns[-1]["completion"]
    turns = [turn for conversation in first for turn in conversation]
    equal, tokens = equal_bits(model, turns)
    reasons = {turn["reason"] for turn in turns}
    print(json.dumps({"turns": len(turns), "tokens": tokens, "equal": equal}), reasons)
    assert equal == tokens > 200 and reasons == {"length", "stop"}
    # Negative control: other weights.
    assert equal_bits(tiny_model("qwen3", seed=1), turns)[0] < tokens
