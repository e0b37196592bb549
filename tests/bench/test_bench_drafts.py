"""`tpdet bench drafts`: synthetic drafters, their rows, and what is refused."""

import json
import random

import pytest

from tpdet.bench.draft_texts import TEXTS
from tpdet.bench.drafts import parse_shares
from tpdet.bench.drafts_rank import Synthetic
from tpdet.cli import main
from tpdet.errors import UsageError


@pytest.mark.slow
def test_right_drafts_save_steps_and_wrong_ones_none(tiny_model, capsys):
    model = str(tiny_model("qwen3", kv_heads=2))
    command = ["bench", "drafts", model, "--cases", "synthetic", "--batch", "2", "--context", "9"]
    assert main([*command, "--acceptance", "0,1", "--generate", "20", "--repeats", "1"]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])
    wrong, _, right, speed = run["rows"]
    assert (wrong["case"], right["case"]) == (
        "synthetic drafts, 0 right",
        "synthetic drafts, 1 right",
    )
    assert wrong["metrics"]["acceptance"] == 0.0 and right["metrics"]["acceptance"] == 1.0
    assert wrong["value"] == wrong["peer_value"] > 2 * right["value"]
    assert right["metrics"]["tokens"] == 40 and right["unit"] == "steps"
    assert right["peer"] == "without drafts" and right["batch"] == 2
    assert speed["unit"] == "tokens/s" and speed["value"] > 0


def test_a_synthetic_drafter_is_right_as_often_as_it_is_to_be():
    answer = list(range(100, 1100))
    drafter = Synthetic(answer, 3, 0.8, random.Random(1))
    assert drafter.look([0] * 3, 3)
    said = drafter.next(1000)
    assert 0.75 < sum(a == b for a, b in zip(said, answer, strict=True)) / 1000 < 0.85
    assert drafter.look([0] * 1003, 1003) == 0


@pytest.mark.parametrize("text", ["", "0.5,x", "1.5", "-0.1"])
def test_shares_outside_0_to_1_are_refused(text):
    with pytest.raises(UsageError, match="is no list of shares"):
        parse_shares(text)
    assert parse_shares("0,0.5,1") == (0.0, 0.5, 1.0)


def test_without_drafters_there_is_nothing_to_time(tiny_model, capsys):
    model = str(tiny_model("qwen3", kv_heads=2))
    assert main(["bench", "drafts", model, "--drafts", "off"]) == 2
    assert "leave drafts auto" in capsys.readouterr().err.splitlines()[-1]


def test_texts_are_of_three_kinds():
    assert list(TEXTS) == ["code edits", "JSON by schema", "chat"]
    for text in TEXTS["JSON by schema"]:
        json.loads(text.schema)
