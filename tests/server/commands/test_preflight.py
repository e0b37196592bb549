"""`tpdet serve` refuses what can be known before it starts anything: one line, the right code."""

import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.lib.receipts import new_audited
from tpdet.audit.receipts.directory import AuditDirectory
from tpdet.audit.receipts.keys import open_key
from tpdet.launch.life.signals import STOP_SIGNALS
from tpdet.launch.start.supervise import serve
from tpdet.server.batches import store, upload
from tpdet.server.commands import preflight, supervised
from tpdet.server.commands.gpus import count_gpus, torch_build
from tpdet.server.commands.preflight import check_device
from tpdet.server.commands.supervised import main


@pytest.fixture
def refuse(monkeypatch, capfd, tmp_path):
    """Runs the command, which may start nothing; (exit code, its only line)."""
    monkeypatch.chdir(tmp_path)
    kept = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        lines = [line for line in capfd.readouterr().err.splitlines() if " INFO " not in line]
        assert len(lines) == 1, lines
        line = json.loads(lines[0])
        assert line.pop("event") == "fatal" and line["exit"] == code
        return code, line["message"]

    def start(*_, **__):
        raise AssertionError("started")

    monkeypatch.setattr("tpdet.launch.start.supervise.LocalRanks", start)
    monkeypatch.setattr(supervised, "serve", serve)
    yield run
    for number, handler in kept.items():
        signal.signal(number, handler)


def cut_out(model, name):
    (model / name).unlink()


def set_key(model, key, value):
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {key: value}))


NO_FILES = (
    ["--api-key-file", "nothere"],
    ["--admin-key-file", "nothere"],
    ["--audit-dir", "audit", "--audit-key", "nothere"],
    ["--chat-template", "nothere"],
    ["--run-secret-file", "nothere"],
    ["--config", "nothere"],
)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--tp", "3"], 2, "tensor-parallel size 3 does not fit"),
        (["--tp", "64"], 2, "use one of 1, 2"),
        (["--frobnicate"], 2, "--frobnicate"),
        (["--weights-root", "w", "--admin-listen", "127.0.0.1:0"], 66, "--weights-root w is no"),
        (["--max-model-len", "999999"], 2, "over the model's context"),
        *((flag, 66, f"{' '.join(flag[-2:])} does not exist: name a ") for flag in NO_FILES),
        (["--answer-cache", "/proc/nope"], 77, "--answer-cache /proc/nope cannot be written"),
        (["--run-dir", "/proc/nope"], 2, "--run-dir /proc/nope cannot be made"),
        (["--run-dir", "x" * 120], 2, "use a shorter directory"),
        (["--run-dir", "file"], 2, "is not a directory"),
        (["--run-dir", "open"], 77, "writable by nobody else"),
        (["--tp", "2", "--transport", "mpi"], 2, "tpdet launch mpirun"),
        (["--tp", "2", "--transport", "peer"], 2, "needs GPUs"),
        (["--leaves", "3"], 2, "leaves"),
        (["--task", "score"], 2, "task score: 'yes' is 2 tokens of this model's vocabulary"),
        (["--reasoning-parser", "qwen3"], 2, "think: this tokenizer has no added tokens <think>"),
        (["--tool-call-parser", "openai"], 2, "--tool-call-parser harmony: this tokenizer has no"),
        (["--tool-call-parser", "glm47", "--skip-tokenizer-init"], 2, "leave --skip-tokenizer"),
        (["--reasoning-parser", "think", "--skip-tokenizer-init"], 2, "leave --skip-tokenizer"),
    ],
)
def test_flags_that_do_not_fit(refuse, model, tmp_path, flags, code, words):
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    found, message = refuse(model, "--device", "cpu", "--port", 0, *flags)
    assert found == code and words in message, message


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (lambda m: shutil.rmtree(m), 66, "is not a directory"),
        (lambda m: cut_out(m, "config.json"), 66, "config.json does not exist"),
        (lambda m: cut_out(m, "tokenizer.json"), 66, "tokenizer.json does not exist"),
        (lambda m: cut_out(m, "model.safetensors"), 66, "holds neither"),
        (lambda m: set_key(m, "architectures", ["GemmaForCausalLM"]), 65, "architectures is"),
        (lambda m: set_key(m, "head_dim", 65), 65, "only even sizes up to 256"),
        (lambda m: (m / "config.json").write_text("{"), 65, "not valid JSON"),
    ],
)
def test_files_that_cannot_be_served(refuse, model, damage, code, words):
    damage(model)
    found, message = refuse(model, "--port", 0)
    assert found == code and words in message, message


def test_an_audit_directory_that_cannot_be_written_to_is_refused_first(refuse, model, tmp_path):
    audited = new_audited(tmp_path)
    flags = model, "--port", 0, "--audit-dir", audited.path
    assert refuse(*flags)[0] == 2
    assert refuse(*flags, "--audit-key", tmp_path / "absent")[0] == 66
    log = AuditDirectory(audited.path).open_log(open_key(str(audited.key)))
    code, message = refuse(*flags, "--audit-key", audited.key)
    log.close()
    assert code == 74 and "is in use by process" in message
    (tmp_path / "file").touch()
    flags = model, "--port", 0, "--audit-dir", tmp_path / "file", "--audit-key", audited.key
    assert refuse(*flags)[0] == 74


def test_a_directory_of_batches_that_cannot_be_used_is_refused(
    refuse, model, tmp_path, monkeypatch
):
    flags = model, "--port", 0, "--batch-dir", tmp_path / "b"
    monkeypatch.setattr(upload, "find_spec", lambda name: None)
    code, message = refuse(*flags)
    assert code == 2 and "pip install 'tpdet[batches]'" in message
    assert not (tmp_path / "b").exists()
    monkeypatch.setattr(upload, "find_spec", lambda name: name)
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.0)
    first = store.BatchStore(tmp_path / "b")
    assert refuse(*flags)[0] == 71
    first.close()
    (tmp_path / "file").touch()
    assert refuse(model, "--port", 0, "--batch-dir", tmp_path / "file")[0] == 77


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_taken_port_is_one_line_at_any_size_and_a_missing_model_comes_first(refuse, model, ranks):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, message = refuse(model, "--tp", ranks, "--port", port)
        assert code == 71 and "another --port" in message
        assert refuse("./nothere", "--tp", ranks, "--port", port)[0] == 66


@pytest.mark.parametrize(
    ("built", "gpus", "wanted", "ranks", "words"),
    [
        (False, None, "cuda", 1, "is built without CUDA"),
        (True, 0, "cuda", 1, "sees no GPU"),
        (True, 2, "cuda", 4, "4 ranks on a host with 2 GPUs"),
        (True, 2, "auto", 4, "4 ranks on a host with 2 GPUs"),
    ],
)
def test_gpus_that_are_not_there(refuse, model, monkeypatch, built, gpus, wanted, ranks, words):
    monkeypatch.setattr(preflight, "torch_build", lambda: ("2.13.0", built))
    monkeypatch.setattr(preflight, "count_gpus", lambda: gpus)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: name)
    set_key(model, "num_key_value_heads", 4)
    code, message = refuse(model, "--device", wanted, "--tp", ranks, "--port", 0)
    assert code == 2 and words in message


def test_the_device_is_known_without_torch(monkeypatch):
    import torch

    assert torch_build() == (torch.__version__, torch.version.cuda is not None)
    assert count_gpus() == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert check_device("cpu", 64) == "cpu"
    monkeypatch.setattr(preflight, "torch_build", lambda: ("2.13.0", True))
    for gpus, found in ((0, "cpu"), (None, "cuda"), (8, "cuda")):  # None: the ranks will tell
        monkeypatch.setattr(preflight, "count_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: name)
        assert check_device("auto", 1) == found


def test_the_checks_need_no_torch():
    program = "import sys, tpdet.server.commands.supervised; print('torch' in sys.modules)"
    found = os.popen(f'{sys.executable} -c "{program}"').read()
    assert found == "False\n"


def test_a_temporary_run_directory_goes_with_a_refused_start(model, monkeypatch, tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with supervised.run_directory(None) as made:
        assert made.parent == folder
    assert list(folder.iterdir()) == []
    with supervised.run_directory(str(folder)) as named:
        assert named == Path(folder)
    assert folder.exists()
