"""Whether drafts are expected to pay: chances and times, from what was seen."""

import pytest

from tpdet.requests.request import Request, SamplingParams
from tpdet.speculative.acceptance import Chances, Luck
from tpdet.speculative.proposers.earlier_outputs import EarlierOutputs
from tpdet.speculative.step_time import Pace


def test_chances_follow_the_rows_of_a_drafter_at_its_trust():
    chances = Chances()
    first = chances.of("ngram", 4)
    for _ in range(200):
        chances.learn("ngram", 5, 0, 7, Luck())
        chances.learn("ngram", 40, 7, 7, Luck())
    assert chances.of("ngram", 4) < 0.1 < first < 0.99 < chances.of("ngram", 40)
    assert chances.of("prediction", 4) == first


def test_bad_luck_is_forgotten_as_steps_pass():
    chances = Chances()
    first = chances.of("ngram", 4), chances.kept("ngram", 0.5)
    for _ in range(50):
        chances.learn("ngram", 4, 0, 1, Luck())
        chances.learn_kept("ngram", False)
    unlucky = chances.of("ngram", 4), chances.kept("ngram", 0.5)
    assert max(unlucky) < 0.1
    chances.step += 3000
    for before, worst, now in zip(
        first, unlucky, (chances.of("ngram", 4), chances.kept("ngram", 0.5)), strict=True
    ):
        assert worst < 0.8 * before < now < before


def test_a_drafter_that_is_never_right_rests_ever_longer_until_it_is_right():
    luck, rested = Luck(), []
    for row in range(8):
        luck.follow(0, 0.9, 1000 * row)
        rested.append(max(luck.until - 1000 * row, 0))
    assert rested == [0, 0, 8, 16, 32, 64, 128, 256]
    luck.follow(3, 0.9, 8000)
    for row in range(4):
        assert luck.until < 8000, "where it was right, three wrong rows are usual"
        luck.follow(0, 0.9, 8000 + row)
    assert luck.until == 8003 + 8
    unknown = Luck()
    for row in range(3):
        assert unknown.until == 0
        unknown.follow(0, 0.1, row, known=False)
    assert unknown.until == 2 + 64


def took(pace, positions, awaited, seconds, times=3):
    for _ in range(times):
        pace.took(positions, awaited, seconds)


def test_times_are_measured_and_estimated_from_the_most_alike_until_then():
    pace = Pace(runs_ahead=True)
    assert 1.1 < pace.time(8, True) / pace.time(1, False) < 1.3
    assert 1.0 < Pace(runs_ahead=False).time(8, True) / pace.time(1, False) < 1.1
    took(pace, 1, False, 4.0)
    assert pace.time(1, False) == pytest.approx(4.0) and not pace.is_measured(7, True)
    assert 1.1 < pace.time(7, True) / 4.0 < 1.3
    took(pace, 7, True, 6.0)
    assert pace.time(8, True) == pytest.approx(6.0) and pace.is_measured(8, True)
    assert 6.0 < pace.time(16, True) < 6.5


def test_one_step_that_captures_a_graph_is_no_measure_but_many_slow_ones_are():
    pace = Pace(runs_ahead=True)
    for _ in range(5):
        pace.took(1, False, 4.0)
        pace.took(8, True, 5.0)
    pace.took(8, True, 60.0)
    assert pace.time(8, True) == pytest.approx(5.0)
    took(pace, 8, True, 60.0, 30)
    assert pace.time(8, True) == pytest.approx(60.0)


def test_old_times_are_forgotten():
    pace = Pace(runs_ahead=False)
    took(pace, 4, True, 2.0)
    took(pace, 12, True, 4.0)
    assert pace.time(12, True) == pytest.approx(4.0)
    took(pace, 4, True, 2.0, 600)
    assert not pace.is_measured(12, True) and 2.0 < pace.time(12, True) < 2.1


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
