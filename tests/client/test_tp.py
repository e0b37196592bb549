"""`--tp N` of the commands that load a model: N ranks of their own, and the bits of one."""

import argparse
import json

import pytest

from tpdet.client.engine_settings import ranks_asked
from tpdet.errors import UsageError
from tpdet.launch.ranks.environment import TORCHRUN_NAMES

SMALL = ("--device", "cpu", "--kv-pages", "32")


@pytest.mark.slow
def test_two_ranks_score_as_one(tpdet, tiny_model):
    model = tiny_model("qwen3", kv_heads=2)
    asked = ("score", model, "--prompt", "The for statement", "--json", *SMALL)
    code, by_two, _ = tpdet(*asked, "--tp", 2)
    assert (code, by_two) == tpdet(*asked)[:2] and code == 0


def test_one_rank_checks_what_two_answered(tpdet, tiny_model, tmp_path):
    """The commands share how ranks are started; what cannot be is refused by each, below."""
    model = tiny_model("qwen3", kv_heads=2)
    answers = tmp_path / "answers"
    asked = ("--prompt", "A", "--max-tokens", 5, "-n", 2, "--json", *SMALL)
    code, output, _ = tpdet("generate", model, *asked, "--tensor-parallel-size", 2)
    assert code == 0
    line = json.loads(output)
    line["outputs"][0]["text"] += "."
    answers.write_text(json.dumps(line))
    code, output, _ = tpdet("check", model, answers, "--json", "-tp", 1, *SMALL)
    assert code == 1 and json.loads(output.splitlines()[0])["parts"] == ["outputs[0].text"]


@pytest.mark.slow
def test_a_check_by_two_ranks_names_what_differs_once(tpdet, tiny_model, tmp_path):
    model, answers = tiny_model("qwen3", kv_heads=2), tmp_path / "answers"
    asked = ("--prompt", "A", "--max-tokens", 5, "--json", *SMALL)
    line = json.loads(tpdet("generate", model, *asked)[1])
    line["outputs"][0]["token_ids"][3] ^= 1
    answers.write_text(json.dumps(line))
    code, output, said = tpdet("check", model, answers, *SMALL, "--tp", 2)
    assert code == 1 and output.count("choice 0, position 3") == 1 and not said


@pytest.mark.parametrize("command", ["check", "score", "generate"])
def test_what_cannot_be_started_is_refused_in_one_line(tpdet, tiny_model, tmp_path, command):
    model = tiny_model("qwen3", kv_heads=2)
    record = {"contract": "c", "weights": "w", "seed": 0, "prompt_token_ids": [1]}
    record |= {"params": {"max_tokens": 1}, "outputs": []}
    (tmp_path / "answers").write_text(json.dumps(record))
    rest = (tmp_path / "answers",) if command == "check" else ("--prompt", "A b c")
    for size, why in ((0, "--tp 0: give a number of ranks"), (3, "size 3 does not fit")):
        code, output, said = tpdet(command, model, *rest, *SMALL, "--tp", size)
        assert code in (2, 65) and why in said and said.count("\n") == 1 and not output


def test_a_server_takes_no_number_of_ranks(tpdet, tmp_path):
    code, _, said = tpdet("check", tmp_path / "none", "--url", "http://h:1", "--tp", 2)
    assert code == 2 and said.startswith("tpdet: --tp is for a model that is loaded here")


def test_under_a_launcher_the_ranks_are_those_that_it_started(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for name, value in zip(TORCHRUN_NAMES, "0202", strict=True):
        monkeypatch.setenv(name, value)
    asked = {size: argparse.Namespace(tp=size) for size in (None, 2, 4)}
    assert ranks_asked(asked[None]) is None and ranks_asked(asked[2]) == 2
    with pytest.raises(UsageError, match="--tp 4 and torchrun, which started 2: leave --tp out"):
        ranks_asked(asked[4])
