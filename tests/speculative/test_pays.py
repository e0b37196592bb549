"""Whether drafts are expected to pay: acceptance rates and times, from what was seen."""

import pytest

from tpdet.requests.request import Request, SamplingParams
from tpdet.scheduler.sequence import PENDING
from tpdet.speculative.acceptance import AcceptanceRates, RejectionStreak
from tpdet.speculative.planner import Speculation
from tpdet.speculative.proposers.earlier_outputs import EarlierOutputs
from tpdet.speculative.step_time import StepTimes
from tpdet.speculative.trials import HOST_DRAFTS, passes_trial


def test_rates_follow_the_rows_of_a_proposer_at_its_match_length():
    rates = AcceptanceRates()
    first = rates.rate("ngram", 4)
    for _ in range(200):
        rates.learn("ngram", 5, 0, 7, RejectionStreak())
        rates.learn("ngram", 40, 7, 7, RejectionStreak())
    assert rates.rate("ngram", 4) < 0.1 < first < 0.99 < rates.rate("ngram", 40)
    assert rates.rate("prediction", 4) == first


def test_rejections_are_forgotten_as_steps_pass():
    rates = AcceptanceRates()
    first = rates.rate("ngram", 4), rates.availability("ngram", 0.5)
    for _ in range(50):
        rates.learn("ngram", 4, 0, 1, RejectionStreak())
        rates.learn_availability("ngram", False)
    rejected = rates.rate("ngram", 4), rates.availability("ngram", 0.5)
    assert max(rejected) < 0.1
    rates.step += 3000
    for before, worst, now in zip(
        first, rejected, (rates.rate("ngram", 4), rates.availability("ngram", 0.5)), strict=True
    ):
        assert worst < 0.8 * before < now < before


def test_a_drafter_that_is_never_right_rests_ever_longer_until_it_is_right():
    streak, rested = RejectionStreak(), []
    for row in range(8):
        streak.follow(0, 0.9, 1000 * row)
        rested.append(max(streak.until - 1000 * row, 0))
    assert rested == [0, 0, 8, 16, 32, 64, 128, 256]
    streak.follow(3, 0.9, 8000)
    for row in range(4):
        assert streak.until < 8000, "where it was right, three wrong rows are usual"
        streak.follow(0, 0.9, 8000 + row)
    assert streak.until == 8003 + 8
    unknown = RejectionStreak()
    for row in range(3):
        assert unknown.until == 0
        unknown.follow(0, 0.1, row, known=False)
    assert unknown.until == 2 + 64


class Said:
    """A sequence of which only the tokens matter."""

    drafted = 0

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)


def test_a_trial_of_a_hosts_drafts_is_over_when_all_its_tokens_are_known():
    rates, asked = AcceptanceRates(), []
    speculation = Speculation(Said(1, 2, 3), [])

    def passes(*drafts: int) -> bool:
        def ask(most: int) -> tuple[int, ...]:
            asked.append(most)
            return drafts[:most]

        end = len(speculation.sequence.tokens)
        return passes_trial(speculation, rates, "ngram", 5, end, ask)

    first = rates.rate("ngram", 5)
    assert not passes(4, 5, 9) and asked == [HOST_DRAFTS] == [2]
    speculation.sequence.tokens += [4, PENDING]
    assert not passes(6) and len(asked) == 1, "the second is not known"
    speculation.sequence.tokens[-1] = 5
    assert passes() and len(asked) == 1
    assert rates.rate("ngram", 5) == pytest.approx((4 * first + 1) / 5), "of the second"
    for row in range(3):
        speculation.streak("ngram").follow(0, 0.99, row)
    assert not passes(6, 7), "it rested, so there is another trial"
    speculation.sequence.tokens += [0, 7]
    before = rates.rate("ngram", 5)
    assert not passes(8, 9) and len(asked) == 3
    assert rates.rate("ngram", 5) == before, "where it is wrong says nothing of other sequences"
    speculation.sequence.tokens += [8, 0]
    assert not passes(1, 2) and len(asked) == 4, "one of two"
    assert rates.rate("ngram", 5) == pytest.approx((4 * first + 1) / 6)


def test_a_proposer_that_is_right_for_most_sequences_needs_a_trial_only_where_it_rested():
    rates, speculation = AcceptanceRates(), Speculation(Said(1, 2, 3), [])
    for _ in range(3):
        rates.learn("ngram", 5, 3, 4)
        trusted = rates.trusts("ngram", 5)
    assert trusted and not rates.trusts("ngram", 40) and not rates.trusts("earlier", 5)
    assert passes_trial(speculation, rates, "ngram", 5, 3, lambda most: (4, 5))
    assert not speculation.trials
    speculation.streak("ngram").rest = 8
    assert not passes_trial(speculation, rates, "ngram", 5, 3, lambda most: (4, 5))
    rates.step += 4096
    assert not rates.trusts("ngram", 5), "that was long ago"


def add(times, positions, synchronous, seconds, count=3):
    for _ in range(count):
        times.add(positions, synchronous, seconds)


def test_times_are_measured_and_estimated_from_the_most_alike_until_then():
    times = StepTimes(runs_ahead=True)
    assert 1.1 < times.seconds(8, True) / times.seconds(1, False) < 1.3
    assert 1.0 < StepTimes(runs_ahead=False).seconds(8, True) / times.seconds(1, False) < 1.1
    add(times, 1, False, 4.0)
    assert times.seconds(1, False) == pytest.approx(4.0) and not times.is_measured(7, True)
    assert 1.1 < times.seconds(7, True) / 4.0 < 1.3
    add(times, 7, True, 6.0)
    assert times.seconds(8, True) == pytest.approx(6.0) and times.is_measured(8, True)
    assert 6.0 < times.seconds(16, True) < 6.5


def test_one_step_that_captures_a_graph_is_no_measure_but_many_slow_ones_are():
    times = StepTimes(runs_ahead=True)
    for _ in range(5):
        times.add(1, False, 4.0)
        times.add(8, True, 5.0)
    times.add(8, True, 60.0)
    assert times.seconds(8, True) == pytest.approx(5.0)
    add(times, 8, True, 60.0, 30)
    assert times.seconds(8, True) == pytest.approx(60.0)


def test_old_times_are_forgotten():
    times = StepTimes(runs_ahead=False)
    add(times, 4, True, 2.0)
    add(times, 12, True, 4.0)
    assert times.seconds(12, True) == pytest.approx(4.0)
    add(times, 4, True, 2.0, 600)
    assert not times.is_measured(12, True) and 2.0 < times.seconds(12, True) < 2.1


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
def test_an_earlier_output_is_proposed_to_the_same_prompt_and_salts_only(other):
    earlier = EarlierOutputs()
    earlier.remember(ask((1, 2, 3), tenant="a"), tuple(range(9)))
    earlier.remember(ask((1, 2, 3), tenant="a"), tuple(range(20, 30)))
    assert earlier.of(ask((1, 2, 3), tenant="a")) == (*range(20, 30), *range(9))
    assert earlier.of(other) == ()
