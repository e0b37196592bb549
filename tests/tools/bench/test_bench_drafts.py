"""`tpdet bench drafts`: synthetic drafters, their rows, and what is refused."""

import json
import random
from pathlib import Path

import pytest

from tpdet.cli import main
from tpdet.errors import UsageError
from tpdet.tools.bench.draft_texts import TEXTS
from tpdet.tools.bench.drafts import Synthetic, drafter_lines, parse_shares
from tpdet.tools.measurement.rows import BenchRow


@pytest.mark.slow
def test_right_drafts_save_steps_and_wrong_ones_none(tiny_model, capsys):
    model = str(tiny_model("qwen3", kv_heads=2))
    command = ["bench", "drafts", model, "--cases", "synthetic", "--batch", "2", "--context", "9"]
    assert main([*command, "--acceptance", "0,1", "--generate", "20", "--repeats", "1"]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])
    wrong, right = (row for row in run["rows"] if row["unit"] == "steps")
    speed = run["rows"][-1]
    assert (wrong["case"], right["case"]) == (
        "synthetic drafts, 0 right",
        "synthetic drafts, 1 right",
    )
    assert wrong["metrics"]["acceptance"] is None, "its trial was wrong: no step verifies a draft"
    assert right["metrics"]["acceptance"] == 1.0
    assert wrong["value"] == wrong["peer_value"] > 2 * right["value"]
    assert right["metrics"]["tokens"] == 40 and right["unit"] == "steps"
    assert 0.1 < right["metrics"]["without_drafts_after"] < 10.0
    assert right["peer"] == "without drafts" and right["batch"] == 2
    assert speed["unit"] == "tokens/s" and speed["value"] > 0


@pytest.mark.slow
def test_a_draft_model_is_timed_as_if_so_many_of_its_drafts_were_right(tiny_model, capsys):
    model = str(tiny_model("qwen3", kv_heads=2, layers=6))
    small = str(tiny_model("qwen3", kv_heads=2, hidden=64, intermediate=128, layers=1))
    command = ["bench", "drafts", model, "--draft-model", small, "--skip-tokenizer-init"]
    command += ["--cases", "synthetic", "--batch", "2", "--context", "9", "--acceptance", "0,1"]
    assert main([*command, "--generate", "40", "--repeats", "1"]) == 0
    *_, last = out = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    wrong, right, own = (row for row in rows if row["unit"] == "steps")
    names = [row["case"] for row in (wrong, right, own)]
    assert names == ["draft model, 0 right", "draft model, 1 right", "draft model"]
    assert right["value"] < 0.7 * right["peer_value"] and right["metrics"]["acceptance"] == 1.0
    assert right["metrics"]["draft_step_ms"] > 0.0
    assert right["mode"].endswith(", drafts auto and " + Path(small).name)
    assert any("draft model, 1 right: a step of draft_model takes" in line for line in out)


def test_of_each_drafter_the_share_that_was_right_is_said():
    counts = {"draft_tokens": 8, "accepted_tokens": 6}
    metrics = {"drafters": {"draft_model": counts}, "draft_step_ms": 0.754}
    metrics["without_drafts_after"] = 0.98
    row = BenchRow(case="chat", value=1.0, unit="steps", tp=1, batch=4, metrics=metrics)
    assert list(drafter_lines(row)) == [
        "TP 1, batch 4, chat: 6 of 8 drafts of draft_model were right (75%)",
        "TP 1, batch 4, chat: a step of draft_model takes 0.75 ms",
        "TP 1, batch 4, chat: without drafts it was 0.98 times as fast afterwards as at first",
    ]
    counts["draft_tokens"] = metrics["draft_step_ms"] = 0
    metrics["without_drafts_after"] = 1.005
    assert list(drafter_lines(row)) == []


def test_a_synthetic_drafter_is_right_as_often_as_it_is_to_be():
    answer = list(range(100, 1100))
    drafter = Synthetic(answer, 3, 0.8, random.Random(1))
    assert drafter.match([0] * 3, 3)
    said = drafter.propose(1000)
    assert 0.75 < sum(a == b for a, b in zip(said, answer, strict=True)) / 1000 < 0.85
    assert drafter.match([0] * 1003, 1003) == 0


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
