"""A damaged model directory is refused at once, whatever it holds, with 65 and a message."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from tests.checkpoint.damaged_models import SECONDS
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.checks import check_checkpoint
from tpdet.checkpoint.resolve import resolve_tokenizer
from tpdet.config import EngineConfig
from tpdet.errors import CheckpointError, NotFoundError, UsageError
from tpdet.launch.host.private_file import read_private_file
from tpdet.launch.host.regular_file import NotRegularError, open_regular
from tpdet.server.settings.settings import load_settings
from tpdet.text.tokenizer import Tokenizer, read_files

pytestmark = pytest.mark.long


def outcomes(model, scratch, every):
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.checkpoint.damaged_models",
            str(model),
            str(scratch),
            str(every),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=600,
        check=True,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_every_damage_ends_in_a_refusal_or_in_a_sound_model(tiny_model, tmp_path, every):
    found = outcomes(tiny_model("qwen3", kv_heads=2), tmp_path, every)
    counts = Counter(code for _, code, _, _ in found)
    # 2: a context that is longer than any table, which a flag can cut.
    assert set(counts) <= {0, 2, 65} and counts[2] <= 2, [f for f in found if f[1] not in (0, 65)]
    assert counts[65] > 100 and counts[0] > 5
    assert all(message for _, code, _, message in found if code)
    assert max(seconds for _, _, seconds, _ in found) < SECONDS
    by_name = {name: (code, message) for name, code, _, message in found}
    for name in ("nine normalizers of ten", "nine decoders of ten", "vocabulary id 4000000000"):
        assert by_name[name][0] == 65, (name, by_name[name])
    assert "named pipe" in by_name["model.safetensors: _pipe"][1]
    assert all(
        by_name[f"{f}: {k}"][0] == 65
        for f in ("config.json", "tokenizer.json")
        for k in ("_pipe", "_socket", "_device", "mkdir")
    )


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    return tmp_path / "pipe"


def test_only_regular_files_are_opened(pipe, tmp_path):
    for path, kind in (
        (pipe, "a named pipe"),
        (tmp_path, "a directory"),
        ("/dev/null", "a device"),
    ):
        with pytest.raises(NotRegularError, match=f"it is {kind}, not a file"):
            open_regular(path)
    (tmp_path / "file").write_bytes(b"x")
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"x"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_no_flag_waits_at_a_pipe(pipe, tmp_path):
    for path in (pipe, tmp_path):
        with pytest.raises(UsageError, match=r"--api-key-file .*: name a file with one key a line"):
            read_private_file(str(path), "--api-key-file", "one key a line", 100)
        with pytest.raises(UsageError, match=r"--config .*: name a TOML file"):
            load_settings(["--config", str(path)], "tpdet.serve")


def test_no_shard_and_no_chosen_template_is_a_pipe(pipe, tmp_path, tokenizer_folder):
    with pytest.raises(CheckpointError, match="named pipe"):
        Tokenizer.load(tokenizer_folder, pipe)
    os.mkfifo(tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"one\.safetensors: it is a named pipe"):
        open_checkpoint(tmp_path)
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(CheckpointError, match=r"index\.json: it is a named pipe"):
        open_checkpoint(tmp_path)


def test_a_tokenizer_that_is_nowhere_is_called_one():
    with pytest.raises(NotFoundError, match=r"tokenizer '\./nothere' is not a directory"):
        resolve_tokenizer("./nothere", ".")
    with pytest.raises(NotFoundError, match=r"model '\./nothere' is not a directory"):
        resolve_tokenizer(None, "./nothere")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named_with_the_remedy(tiny_model, tmp_path, name):
    """What a clone without git-lfs holds: 130 bytes in the place of each large file."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "5" * 64 + "\nsize 9\n"
    (model / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name}.*git-lfs pointer .git lfs pull"):
        check_checkpoint(EngineConfig(model=str(model)), 1)
        read_files(model)
        open_checkpoint(model)


def test_columns_of_experts_that_ranks_do_not_cut_are_refused_before_they_start(tiny_model):
    model = str(tiny_model("qwen3_moe"))
    check_checkpoint(EngineConfig(model=model, experts="lanes"), 8)
    with pytest.raises(UsageError, match="experts columns: 8 ranks do not cut"):
        check_checkpoint(EngineConfig(model=model, experts="columns"), 8)
