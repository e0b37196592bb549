"""Whether drafts are expected to pay: chances and times, from what was seen."""

import pytest

from tpdet.drafters.chances import Chances
from tpdet.drafters.earlier import EarlierOutputs
from tpdet.drafters.pace import Pace
from tpdet.request import Request, SamplingParams


def test_chances_follow_the_rows_of_a_drafter_at_its_trust():
    chances = Chances()
    first = chances.of("ngram", 4)
    for _ in range(200):
        chances.learn("ngram", 5, 0, 7)
        chances.learn("ngram", 40, 7, 7)
    assert chances.of("ngram", 4) < 0.1 < first < 0.99 < chances.of("ngram", 40)
    assert chances.of("prediction", 4) == first


def test_times_are_measured_and_estimated_until_then():
    pace = Pace(runs_ahead=True)
    plain, drafted = (1, False), (8, True)
    assert 1.2 < pace.ratio(plain, drafted) < 1.4
    assert Pace(runs_ahead=False).ratio((1, True), (8, True)) < 1.1
    for _ in range(3):
        pace.took(1, False, 4.0)
        pace.took(7, True, 6.0)
    assert pace.ratio(plain, drafted) == 1.5


def test_one_step_that_captures_a_graph_is_no_measure_but_many_slow_ones_are():
    pace = Pace(runs_ahead=True)
    for _ in range(5):
        pace.took(1, False, 4.0)
        pace.took(8, True, 5.0)
    pace.took(8, True, 60.0)
    assert pace.ratio((1, False), (8, True)) == 1.25
    for _ in range(30):
        pace.took(8, True, 60.0)
    assert pace.ratio((1, False), (8, True)) == 15.0


def test_old_times_are_forgotten_and_a_position_is_measured():
    pace = Pace(runs_ahead=False)
    assumed = pace.position(4)
    for _ in range(3):
        pace.took(4, True, 2.0)
        pace.took(12, True, 4.0)
    assert pace.position(4) == pytest.approx(1.0 / 12)
    for _ in range(2100):
        pace.took(4, True, 2.0)
    assert pace.position(4) == assumed and pace.ratio((4, True), (12, True)) < 1.1


def ask(prompt, tenant="", salt=""):
    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        params=SamplingParams(),
        tenant_salt=tenant,
        cache_salt=salt,
    )


@pytest.mark.parametrize(
    "other", [ask((1, 2, 4)), ask((1, 2, 3), tenant="b"), ask((1, 2, 3), "a", "s")]
)
def test_an_earlier_output_is_told_to_the_same_prompt_and_salts_only(other):
    earlier = EarlierOutputs()
    earlier.remember(ask((1, 2, 3), tenant="a"), tuple(range(9)))
    earlier.remember(ask((1, 2, 3), tenant="a"), tuple(range(20, 30)))
    assert earlier.of(ask((1, 2, 3), tenant="a")) == (*range(20, 30), *range(9))
    assert earlier.of(other) == ()
