"""What the scheduler refuses: requests that cannot run, results that do not fit a step."""

import pytest

from tests.scheduler.simulated.answers import make_request
from tests.scheduler.simulated.requests import simulation
from tests.scheduler.simulated.simulation import make_scheduler
from tpdet.control.plan import NAN
from tpdet.control.row_messages import SampledToken
from tpdet.errors import IntegrityError, OverloadedError, RequestError


def test_a_request_too_large_for_the_cache_is_refused_by_name():
    scheduler = make_scheduler(num_pages=2)
    scheduler.add(make_request("fits", 500, max_tokens=13))  # 512 positions: the last is not stored
    with pytest.raises(RequestError, match="needs 3 KV pages of 256 tokens, and the cache has 2"):
        scheduler.add(make_request("big", 500, max_tokens=14))
    with pytest.raises(RequestError, match="KV pages") as error:
        scheduler.add(make_request("huge", 600, max_tokens=1))
    assert error.value.param == "prompt"
    assert scheduler.statistics().requests_waiting == 1


def test_what_can_never_run_is_refused():
    scheduler = make_scheduler(max_model_len=100)
    scheduler.add(make_request("a", 90, max_tokens=10))
    with pytest.raises(RequestError, match="context of 100"):
        scheduler.add(make_request("b", 90, max_tokens=11))
    with pytest.raises(RequestError, match="is in use"):
        scheduler.add(make_request("a", 5))
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(make_request("c", 0))
    with pytest.raises(IntegrityError, match="no seed"):
        scheduler.add(make_request("d", seed=None))


def test_the_queue_is_bounded_by_requests_that_never_started():
    sim = simulation(make_request("a", max_tokens=50), max_queue=2, max_num_seqs=1)
    sim.step()
    for name in ("b", "c"):
        sim.scheduler.add(make_request(name, n=5, max_tokens=2))
    sim.preempt_all()
    with pytest.raises(OverloadedError, match="2 requests wait"):
        sim.scheduler.add(make_request("d"))
    sim.scheduler.abort("b")
    sim.scheduler.add(make_request("d", max_tokens=2))
    sim.run()
    sim.check_idle()


def test_results_that_do_not_fit_the_step_are_refused_and_change_nothing():
    sim = simulation(make_request("a", 100, max_tokens=9, prompt_logprobs=0))
    plan = sim.begin()
    _, (scoring,) = sim.scheduler.latest(plan).wanted()
    scores = [SampledToken(token, -1.0) for token in scoring.target_ids]
    assert len(scores) == 64
    good = {(0, 0): scores}
    for step, sampled, given in [
        (plan.step + 1, {}, good),
        (plan.step, {(5, 0): SampledToken(1, 0.0)}, good),
        (plan.step, {(0, 0): SampledToken(1, 0.0)}, good),
        (plan.step, {}, {(0, 0): scores[:-1]}),
        (plan.step, {}, {(0, 0): [*scores[:-1], SampledToken(49, -1.0)]}),
        (plan.step, {}, None),
    ]:
        with pytest.raises(IntegrityError):
            sim.scheduler.commit(step, sampled, given)
    assert sim.scheduler.commit(plan.step, {}, good) == []
    with pytest.raises(IntegrityError, match="none is pending"):
        sim.scheduler.commit(plan.step, {}, good)


def test_a_token_that_is_wanted_and_missing_is_refused():
    sim = simulation(make_request("a", max_tokens=9))
    plan = sim.begin()
    with pytest.raises(IntegrityError, match="wants a token"):
        sim.scheduler.commit(plan.step, {})


def test_a_step_in_flight_must_be_committed_before_the_next():
    sim = simulation(make_request("a", max_tokens=9))
    sim.begin()
    with pytest.raises(IntegrityError, match="is pending"):
        sim.scheduler.schedule()
    with pytest.raises(IntegrityError, match="is pending"):
        sim.scheduler.heartbeat()


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.policy.page_manager.allocator.release(0),
        lambda s: s.policy.page_manager.table.apply(s.policy.page_manager._events or _nan(s)),
        lambda s: s.policy.running[0].__setattr__("pages", (1,)),
        lambda s: s.policy.running.remove(s.policy.running[0]),
        lambda s: s.policy.waiting.put(s.policy.running[0]),
        lambda s: s.policy.running[1].__setattr__("computed", 900),
        lambda s: s.policy.running[1].__setattr__("finished", True),
    ],
)
def test_check_integrity_sees_damage(damage):
    sim = simulation(*(make_request(c, max_tokens=9) for c in "ab"))
    sim.step()
    sim.scheduler.check_integrity()
    damage(sim.scheduler)
    with pytest.raises(IntegrityError):
        sim.scheduler.check_integrity()


def _nan(scheduler):
    from tpdet.control.plan import PageEvent

    sequence = scheduler.policy.running[0]
    return (PageEvent(NAN, sequence.pages[0], sequence.version_id),)
