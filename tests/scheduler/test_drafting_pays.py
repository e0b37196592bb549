"""Drafts are made where they give more tokens a second, by an H200's times of steps."""

import pytest

from tests.scheduler.drafting_simulation import AWAITED, PLAIN, Server
from tpdet.speculative.acceptance import PROOF


def times(tokens, chances, turns=2, server=None, **how):
    """Tokens a second with drafts, as multiples of those without: of requests in turns."""
    server = server or Server()
    server.speculator.paused = True
    off = server.tokens_per_second(tokens, [None] * len(chances), **how)
    server.speculator.paused = False
    return [
        server.tokens_per_second(tokens, chances, seed=turn, **how) / off for turn in range(turns)
    ]


@pytest.mark.parametrize(
    ("batch", "tokens", "chance", "least"),
    [
        (1, 256, 0.8, 3.3),
        (16, 128, 0.8, 1.9),
        (64, 64, 0.8, 1.35),
        (1, 256, 0.5, 1.4),
        (16, 128, 0.5, 1.15),
        (1, 256, 0.95, 8.0),
    ],
)
def test_drafts_that_are_often_right_pay_from_the_first_answer_to_the_last(
    batch, tokens, chance, least
):
    """Requests end at different times, and the last ones run alone: that is counted."""
    assert min(times(tokens, [chance] * batch, 3 if batch == 1 else 2)) > least


@pytest.mark.parametrize(
    ("batch", "tokens", "chance", "least"),
    [(1, 256, 0.8, 3.9), (16, 128, 0.8, 2.2), (64, 64, 0.8, 1.5), (16, 128, 0.5, 1.25)],
)
def test_steps_behind_unverified_drafts_pay_more(batch, tokens, chance, least):
    """No step waits, and behind a wrong draft the others are right as often."""
    server = Server(follows=True)
    assert min(times(tokens, [chance] * batch, 2, server)) > least
    waits = times(tokens, [chance] * batch, 3, whole=False)
    assert sum(times(tokens, [chance] * batch, 3, server, whole=False)) > 1.04 * sum(waits)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 256), (16, 128), (64, 48)])
@pytest.mark.parametrize("chance", [None, 0.0, 0.3])
def test_steps_behind_drafts_that_are_rarely_right_cost_little(batch, tokens, chance):
    rates = times(tokens, [chance] * batch, 3, Server(follows=True), whole=False)
    assert min(rates) > 0.97 and sum(rates) / 3 > 0.98


@pytest.mark.parametrize(("batch", "tokens"), [(1, 256), (4, 128), (16, 128), (64, 48)])
@pytest.mark.parametrize("finds", [0.1, 1.0])
def test_drafts_that_are_never_right_are_in_no_step(batch, tokens, finds):
    """From the first call on: no row waits for them, and no graph is captured."""
    server = Server(captures=True)
    rates = times(tokens, [0.0] * batch, 2, server, whole=False, finds=finds)
    assert min(rates) > 0.998
    assert not server.captured and not server.speculator.counts


def test_without_trials_drafts_that_are_never_right_cost_steps(monkeypatch):
    """Negative control."""
    monkeypatch.setattr("tpdet.speculative.speculator.UNTRIED", ("teller",))
    server = Server(captures=True)
    assert min(times(128, [0.0] * 16, 2, server, whole=False)) < 0.97
    assert server.captured and server.speculator.counts


@pytest.mark.parametrize(("batch", "tokens"), [(1, 256), (16, 128), (64, 48)])
@pytest.mark.parametrize("chance", [None, 0.0, 0.3])
def test_drafts_that_are_rarely_right_cost_little(batch, tokens, chance):
    rates = times(tokens, [chance] * batch, 3, whole=False)
    assert min(rates) > 0.97 and sum(rates) / 3 > 0.98


def test_what_one_step_of_many_rows_had_of_luck_decides_nothing():
    """Drafts that hardly pay, where waiting costs a third: no turning back and forth."""
    waiting = (5.3, 5.3, 5.4, 5.5, 5.8, 6.5, 8.0, 9.0, 11.6)
    ahead = (4.33, 4.33, 4.4, 4.5, 4.65, 5.3, 6.0, 7.2, 10.2)
    assert min(times(256, [0.6] * 64, 3, Server((ahead, waiting)), whole=False)) > 0.99


def test_a_match_now_and_then_costs_little_and_pays_where_it_is_right():
    for length, chance, least in ((4, 0.0, 0.985), (12, 0.1, 0.985), (12, 0.9, 1.3)):
        assert min(times(256, [chance], finds=0.3, match_length=length)) > least


@pytest.mark.parametrize(
    ("chances", "least"), [([0.8, 0.0] * 8, 1.6), ([0.95, 0.3] * 8, 2.5), ([0.95, 0.0] * 32, 1.6)]
)
def test_sequences_on_which_a_drafter_is_never_right_take_nothing_from_the_others(chances, least):
    server = Server()
    rates = times(64, chances, server=server, whole=False)
    assert min(rates) > least


def test_what_measured_times_forbid_is_given_up():
    """Steps that await results, or have more positions, take three times as long."""
    slow = PLAIN, tuple(3.0 * each for each in AWAITED)
    rates = times(256, [0.6], 2, Server(slow))
    assert rates[0] > 0.9 and rates[1] > 0.97
    assert min(times(256, [0.95], 2, Server(slow))) > 2.0


def test_drafters_that_were_never_right_are_believed_again():
    server = Server()
    assert min(times(256, [0.0], 2, server)) > 0.97
    assert times(1500, [0.8], 2, server)[1] > 3.3


def with_model(batch, chance, turns=3, tokens=384, proof=PROOF, seed=0):
    """Whole calls with a draft model on a server that has just started; and the server."""
    server = Server(captures=True, model=chance, proof=proof, seed=seed)
    server.speculator.paused = True
    off = server.tokens_per_second(tokens, [None] * batch)
    server.speculator.paused = False
    each = [chance] * batch
    rates = [server.tokens_per_second(tokens, each, seed + i) / off for i in range(turns)]
    return rates, server


@pytest.mark.parametrize("batch", [1, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_a_draft_model_that_is_never_right_is_in_no_step(batch):
    """Trials cost a fiftieth at most, in the first call too, and capture nothing."""
    rates, server = with_model(batch, 0.0)
    assert min(rates) > 0.98
    assert not server.captured and not server.speculator.counts


def test_without_trials_a_draft_model_that_is_never_right_costs_steps():
    rates, server = with_model(1, 0.0, turns=1, proof=0)
    assert rates[0] < with_model(1, 0.0, turns=1)[0][0] and server.speculator.counts


def test_a_draft_model_that_is_often_right_pays_from_the_first_call_where_it_gains_much():
    rates, _ = with_model(1, 0.8)
    assert min(rates) > 1.4
    rates, _ = with_model(4, 0.8)
    assert min(rates) > 1.35


@pytest.mark.parametrize("seed", [5, 8])
def test_a_draft_model_whose_first_drafts_are_wrong_is_believed_soon(seed):
    """Two of three, one after the other, are usual at 0.8 now and then."""
    assert with_model(1, 0.8, turns=1, seed=seed)[0][0] > 1.3


def test_a_draft_model_that_gains_little_needs_graphs_that_are_there():
    rates, server = with_model(16, 0.8)
    assert min(rates) > 1.0 and max(rates) > 1.05
    assert len(server.captured) < 4


@pytest.mark.parametrize("batch", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_a_draft_model_is_left_out_where_graphs_cost_more_than_it_gains(batch):
    rates, server = with_model(batch, 0.8)
    assert min(rates) > 0.999 and not server.captured
