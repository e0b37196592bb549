"""The command line: its commands and flags are frozen, and each does what it says."""

import json
import subprocess
import sys

import pytest

from tpdet.cli import main


def tpdet(*arguments, timeout=120):
    command = [sys.executable, "-m", "tpdet", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_the_commands_are_those_users_know():
    done = tpdet("--help")
    assert done.returncode == 0
    for command in ("serve", "generate", "verify", "bench", "make-model", "env", "stop"):
        assert command in done.stdout


def test_the_servers_flags_keep_their_names():
    done = tpdet("serve", "--help")
    assert done.returncode == 0, done.stderr
    for flag in (
        "--model", "--revision", "--tokenizer", "--chat-template", "--load-format", "--host",
        "--port", "--served-model-name", "--api-key-file", "--max-model-len", "--max-num-seqs",
        "--max-num-batched-tokens", "--gpu-memory-utilization", "--kv-pages",
        "--enable-prefix-caching", "--no-enable-prefix-caching", "--dtype", "--seed", "--device",
        "--transport", "--fold-order", "--row-layers", "--leaves", "--run-dir", "--audit-dir",
        "--start-timeout", "--step-timeout", "--drain-timeout", "--max-queue", "--config",
        "--print-limits",
        "--tp", "--tensor-parallel-size", "-tp",
    ):  # fmt: skip
        assert flag in done.stdout, flag


def test_limits_are_printed_as_json():
    done = tpdet("serve", "--print-limits")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_env_prints_what_may_change_bits():
    facts = json.loads(tpdet("env").stdout)
    assert facts["architecture"].startswith("cpu-")
    assert {"code", "blas", "cpu capability", "package torch"} <= facts.keys()


def test_make_model_and_generate_answer_reproducibly(tmp_path):
    model = tmp_path / "model"
    made = tpdet("make-model", model, "--like", "llama", "--hidden", 128, "--layers", 1,
                 "--heads", 2, "--vocab", 1024)  # fmt: skip
    assert made.returncode == 0, made.stderr
    answers = [
        tpdet("generate", model, "--prompt", "The list", "--max-tokens", 5, "--json",
              "--temperature", 0.9, "--seed", 4)
        for _ in range(2)
    ]  # fmt: skip
    assert answers[0].returncode == 0, answers[0].stderr
    assert answers[0].stdout == answers[1].stdout
    (output,) = [json.loads(line) for line in answers[0].stdout.splitlines()]
    assert output["seed"] == 4 and len(output["outputs"][0]["token_ids"]) <= 5


def test_bench_writes_its_rows(tiny_model, tmp_path):
    output = tmp_path / "latency.json"
    done = tpdet("bench", tiny_model("qwen3"), "--batch", "1,2", "--prompt-tokens", 8,
                 "--prefill-tokens", 32, "--steps", 2, "--output", output)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(output.read_text())
    assert [row["case"] for row in run["rows"]][:2] == ["decode", "decode"]
    assert all(row["value"] > 0 for row in run["rows"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "/nowhere", "--prompt", "x"], 66, "is not a directory"),
        (["stop", "/nowhere"], 2, "is not a run directory"),
        (["make-model", "X", "--like", "llama", "--vocab", "10"], 2, "at least 1024"),
        (["make-model", "X", "--like", "llama", "--heads", "6", "--kv-heads", "4"], 2, "divide"),
        (["verify", "--tp", "one"], 2, "not a list of numbers"),
        (["serve", "x", "--tp", "99"], 2, "--tp: 99 is out of range"),
        (["serve", "x", "--tp", "x"], 2, "--tp: 'x' is not a whole number"),
        (["serve"], 2, "no model is given"),
        (["serve", "--config", "/nowhere.toml"], 66, "does not exist"),
    ],
)
def test_mistakes_have_their_exit_codes_and_a_remedy(tmp_path, monkeypatch, capsys, arguments,
                                                     code, message):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nothing"], ["verify", "--surprise"], []])
def test_unknown_commands_and_flags_are_usage_errors(arguments):
    assert tpdet(*arguments).returncode == 2
