"""How sequences end: ending tokens, lengths, aborts, failures."""

import pytest

from tests.scheduler.simulated.answers import EOS, make_request
from tests.scheduler.simulated.requests import keys, simulation
from tpdet.control.plan import EVICT, NAN
from tpdet.control.row_messages import SampledToken
from tpdet.requests.request import TokenOutput


def test_eos_ends_a_sequence_and_ignore_eos_does_not():
    request = make_request("eos", max_tokens=500)
    patient = make_request("patient", max_tokens=500, ignore_eos=True)
    sim = simulation(request, patient)
    sim.run()
    sim.check_answer(request)
    sim.check_answer(patient)
    assert (sim.answers["eos", 0].finish, sim.answers["eos", 0].tokens[-1]) == ("stop", EOS)
    assert sim.answers["patient", 0].finish == "length"
    assert EOS in sim.answers["patient", 0].tokens


def test_a_stop_id_on_the_last_allowed_token_is_a_stop():
    free = make_request("a", max_tokens=3, ignore_eos=True)
    sim = simulation(free)
    sim.run()
    third = sim.answers["a", 0].tokens[2]
    sim = simulation(make_request("a", max_tokens=3, ignore_eos=True, stop_token_ids=(third,)))
    sim.run()
    assert sim.answers["a", 0].finish == "stop"


def test_min_tokens_forbids_the_ending_ids_until_it_is_reached():
    request = make_request("a", max_tokens=40, min_tokens=3, stop_token_ids=(11, 9))
    sim = simulation(request)
    for generated in range(4):
        plan = sim.begin()
        (row,), _ = sim.scheduler.latest(plan).wanted()
        assert row.forbidden == ((EOS, 9, 11) if generated < 3 else ())
        sim.scheduler.commit(plan.step, {(0, 0): SampledToken(20, 0.0)})


def test_a_forbidden_token_fails_that_request_alone():
    sim = simulation(make_request("a", max_tokens=9, min_tokens=3), make_request("b", max_tokens=9))
    plan = sim.begin()
    outputs = sim.scheduler.commit(
        plan.step, {(0, 0): SampledToken(EOS, 0.0), (1, 0): SampledToken(20, -1.0)}
    )
    assert (outputs[0].request_id, outputs[0].code) == ("a", "integrity_error")
    assert outputs[1:] == [TokenOutput("b", 0, 20, -1.0)]
    assert keys(sim.begin()) == [(1, 0)]


def test_an_abort_in_flight_keeps_the_pages_until_the_commit():
    sim = simulation(make_request("a", max_tokens=50), make_request("b", max_tokens=50))
    plan = sim.begin()
    sim.scheduler.abort("a")
    assert sim.scheduler.statistics().pages_used == 2
    sim.scheduler.check_integrity()
    sim.end(plan)
    assert ("a", 0) not in sim.answers
    assert sim.scheduler.statistics().pages_used == 1
    following = sim.begin()
    assert [(e.kind, e.page) for e in following.events] == [(EVICT, 0)]


def test_aborts_of_the_waiting_the_preempted_and_the_unknown():
    sim = simulation(*(make_request(c, max_tokens=50) for c in "ab"), max_num_seqs=1)
    sim.step()
    sim.scheduler.abort("b")
    sim.scheduler.abort("nobody")
    sim.scheduler.abort("a")
    sim.scheduler.abort("a")
    assert not sim.scheduler.has_work
    assert sim.scheduler.schedule() is None
    assert sim.scheduler.statistics().totals.requests_aborted == 2
    sim.check_idle()


def test_one_choice_can_be_ended_without_the_others():
    request = make_request("a", n=3, max_tokens=30, ignore_eos=True)
    sim = simulation(request)
    sim.step()
    sim.scheduler.abort("a", 1)
    sim.run()
    assert [len(sim.answers["a", choice].tokens) for choice in range(3)] == [30, 1, 30]
    assert sim.scheduler.statistics().requests_finished == 1


def test_a_finished_requests_id_may_come_again():
    request = make_request("a", max_tokens=3)
    sim = simulation(request)
    sim.run()
    del sim.answers["a", 0]
    sim.scheduler.add(request)
    sim.run()
    sim.check_answer(request)


@pytest.mark.parametrize("in_flight", [True, False])
def test_after_a_numerical_error_the_pages_are_marked_and_nobody_else_notices(in_flight):
    other = make_request("b", max_tokens=9)
    sim = simulation(make_request("a", n=2, max_tokens=9), other)
    plan = sim.begin()
    if not in_flight:
        sim.end(plan)
    failed = sim.scheduler.fail("a", "numerical_error", "NaN in the logits")
    assert (failed.request_id, failed.code) == ("a", "numerical_error")
    assert sim.scheduler.fail("a", "numerical_error", "again") is None
    if in_flight:
        sim.end(plan)
        assert ("a", 0) not in sim.answers
    following = sim.begin()
    assert [(e.kind, e.page) for e in following.events] == [
        (NAN, 0),
        (EVICT, 0),
        (NAN, 1),
        (EVICT, 1),
    ]
    sim.end(following)
    sim.run()
    sim.check_answer(other)
    assert sim.scheduler.statistics().totals.requests_failed == 1
    sim.check_idle()


def test_other_failures_do_not_mark_pages_as_nan():
    sim = simulation(make_request("a", max_tokens=9))
    sim.step()
    sim.scheduler.fail("a", "draining", "the server stops")
    assert [e.kind for e in sim.scheduler.heartbeat().events] == [EVICT]
