import subprocess
import sys

import pytest

from tests.scheduler_simulation import (
    EOS,
    Simulation,
    answer_alone,
    draw,
    make_request,
    make_scheduler,
)
from tpdet.cache.versions import version_id
from tpdet.errors import IntegrityError, OverloadedError, RequestError
from tpdet.plan import ALLOCATE, EVICT, NAN
from tpdet.request import TokenOutput
from tpdet.sampling_row import SampledToken


def simulation(*requests, **settings) -> Simulation:
    sim = Simulation(make_scheduler(**settings))
    for request in requests:
        sim.scheduler.add(request)
    return sim


def keys(plan):
    return [(row.admission, row.choice) for row in plan.rows]


def test_the_scheduler_and_the_page_tables_import_no_torch():
    code = (
        "import sys, tpdet.scheduler, tpdet.cache.pages, tpdet.cache.versions\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_prompt_is_cut_into_chunks_of_the_budget_and_only_the_last_wants_logits():
    sim = simulation(make_request("a", 150, max_tokens=2, ignore_eos=True))
    sim.run()
    shapes = [(row.start, len(row.token_ids), row.logits) for p in sim.plans for row in p.rows]
    assert shapes == [(0, 64, 0), (64, 64, 0), (128, 22, 1), (150, 1, 1)]


def test_decodes_go_first_and_prompts_take_the_rest_in_order_of_admission():
    long = [make_request(name, 150, max_tokens=9, ignore_eos=True) for name in ("b", "c")]
    sim = simulation(make_request("a", 3, max_tokens=9, ignore_eos=True), *long)
    sim.step()
    plan = sim.begin()
    assert [(r.admission, len(r.token_ids)) for r in plan.rows] == [(0, 1), (1, 63)]
    sim.end(plan)
    plan = sim.begin()
    assert [(r.admission, len(r.token_ids)) for r in plan.rows] == [(0, 1), (1, 26), (2, 37)]


def test_rows_stand_in_the_order_of_admission_then_choice():
    sim = simulation(make_request("a", n=3, max_tokens=4), make_request("b", n=2, max_tokens=4))
    plan = sim.begin()
    assert keys(plan) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert plan.rows[3].version_id == version_id("b", 1, 0)


def test_no_more_sequences_run_than_there_are_seats():
    sim = simulation(make_request("a", n=7, max_tokens=3, ignore_eos=True), max_num_seqs=3)
    sim.run()
    assert max(len(plan.rows) for plan in sim.plans) == 3


def test_choice_zero_of_many_is_the_answer_of_one():
    one, many = make_request("a", max_tokens=20), make_request("a", n=4, max_tokens=20)
    sims = [simulation(request) for request in (one, many)]
    for sim in sims:
        sim.run()
    assert sims[0].answers["a", 0] == sims[1].answers["a", 0]
    assert sims[1].answers["a", 0] != sims[1].answers["a", 1]


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
        (row,), _ = sim.scheduler.wanted(plan)
        assert row.forbidden_ids == ((EOS, 9, 11) if generated < 3 else ())
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


def test_a_sampling_row_holds_what_the_token_may_depend_on():
    request = make_request(
        "a", 4, n=2, seed=99, max_tokens=9, ignore_eos=True, presence_penalty=1.0
    )
    sim = simulation(request)
    sim.step()
    sim.scheduler.preempt_all()
    plan = sim.begin()
    row = sim.scheduler.wanted(plan)[0][1]
    assert plan.rows[1].start == 0
    assert (row.seed, row.choice, row.prompt_length, row.position) == (99, 1, 4, 5)
    first = sim.answers["a", 1].tokens
    assert list(row.token_ids) == [*request.prompt_token_ids, *first]
    assert row.params is request.params
    plain = simulation(make_request("b", 4))
    assert plain.scheduler.wanted(plain.begin())[0][0].token_ids == ()


def test_scoring_a_prompt_only_gives_one_output_without_a_token():
    request = make_request("a", 200, n=2, max_tokens=0, prompt_logprobs=2)
    sim = simulation(request, make_request("plain", 100, max_tokens=0))
    sim.run()
    sim.check_answer(request)
    assert sim.answers["plain", 0].tokens == [-1]
    assert all(row.logits == 0 for plan in sim.plans for row in plan.rows if row.admission == 1)
    assert all(row.logits == 0 for plan in sim.plans for row in plan.rows if row.choice == 1)
    sim.check_idle()


def test_prompt_scores_want_all_of_a_rows_logits_and_come_before_the_first_token():
    request = make_request("a", 150, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    sim = simulation(request)
    sim.run()
    assert [row.logits for plan in sim.plans for row in plan.rows] == [64, 64, 22, 1, 1]
    sim.check_answer(request)


def test_a_prompt_of_one_token_has_nothing_to_score():
    request = make_request("a", 1, max_tokens=2, prompt_logprobs=3)
    sim = simulation(request)
    sim.run()
    assert sim.prompt_outputs["a"].logprobs == (None,)


def test_prompt_scores_are_neither_lost_nor_told_twice_by_preemption():
    request = make_request("a", 300, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    sim = simulation(request)
    for step in range(40):
        if step in (2, 7, 13):
            sim.scheduler.preempt_all()
        sim.step()
    sim.check_answer(request)
    assert sim.scheduler.statistics().preemptions == 3
    scored = [row.logits for plan in sim.plans for row in plan.rows]
    assert sum(scored) == 300 + 3, "no position is scored twice"


def test_the_latest_goes_first_when_pages_run_out_and_resumes_with_the_same_tokens():
    requests = [make_request(c, 250, seed=3, max_tokens=30, ignore_eos=True) for c in "abc"]
    sim = simulation(*requests, num_pages=4, max_num_batched_tokens=1000)
    sim.run()
    for request in requests:
        sim.check_answer(request)
    assert sim.scheduler.statistics().preemptions == 1
    evictions = [
        (plan.step, e.version_id) for plan in sim.plans for e in plan.events if e.kind == EVICT
    ]
    assert evictions[0][1] == version_id("c", 3)
    sim.check_idle()


def test_within_a_request_the_highest_choice_is_preempted_first():
    request = make_request("a", 250, n=3, max_tokens=30, ignore_eos=True)
    sim = simulation(request, num_pages=4, max_num_batched_tokens=1000)
    sim.run()
    sim.check_answer(request)
    first = next(e for plan in sim.plans for e in plan.events if e.kind == EVICT)
    assert first.version_id == version_id("a", 1, 2)


def test_nobody_passes_the_head_of_the_line():
    # Four pages: "a" holds two, "big" wants three, "small" would fit but came later.
    sim = simulation(
        make_request("a", 300, max_tokens=3, ignore_eos=True),
        make_request("big", 700, max_tokens=2, ignore_eos=True),
        make_request("small", 5, max_tokens=2, ignore_eos=True),
        num_pages=4,
        max_num_batched_tokens=1000,
    )
    sim.run()
    order = list(dict.fromkeys(key for plan in sim.plans for key in keys(plan)))
    assert order == [(0, 0), (1, 0), (2, 0)]
    assert keys(sim.plans[0]) == [(0, 0)]


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
    sim.scheduler.preempt_all()
    with pytest.raises(OverloadedError, match="2 requests wait"):
        sim.scheduler.add(make_request("d"))
    sim.scheduler.abort("b")
    sim.scheduler.add(make_request("d", max_tokens=2))
    sim.run()
    sim.check_idle()


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
        (NAN, 0), (EVICT, 0), (NAN, 1), (EVICT, 1)
    ]  # fmt: skip
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


def test_results_that_do_not_fit_the_step_are_refused_and_change_nothing():
    sim = simulation(make_request("a", 100, max_tokens=9, prompt_logprobs=0))
    plan = sim.begin()
    _, (scoring,) = sim.scheduler.wanted(plan)
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
    with pytest.raises(IntegrityError, match="none is in flight"):
        sim.scheduler.commit(plan.step, {}, good)


def test_a_token_that_is_wanted_and_missing_is_refused():
    sim = simulation(make_request("a", max_tokens=9))
    plan = sim.begin()
    with pytest.raises(IntegrityError, match="wants a token"):
        sim.scheduler.commit(plan.step, {})


def test_a_step_in_flight_must_be_committed_before_the_next():
    sim = simulation(make_request("a", max_tokens=9))
    sim.begin()
    with pytest.raises(IntegrityError, match="in flight"):
        sim.scheduler.schedule()
    with pytest.raises(IntegrityError, match="in flight"):
        sim.scheduler.heartbeat()


def test_a_step_ahead_names_the_tokens_that_the_step_in_flight_draws():
    sim = simulation(*(make_request(c, 5 + i, max_tokens=9) for i, c in enumerate("abc")))
    sim.step()
    first, second = sim.begin(), sim.begin(ahead=True)
    assert all(row.token_ids[0] >= 0 for row in first.rows)
    assert [row.token_ids for row in second.rows] == [(-1,), (-2,), (-3,)]
    assert sim.begin(ahead=True) is None, "two steps in flight at most"
    sim.end(first)
    third = sim.begin(ahead=True)
    assert [row.start for row in third.rows] == [7, 8, 9]


def test_no_step_is_planned_past_the_last_token():
    sim = simulation(make_request("a", max_tokens=2, ignore_eos=True))
    first, second = sim.begin(), sim.begin(ahead=True)
    assert sim.begin(ahead=True) is None
    sim.end(first)
    assert sim.begin(ahead=True) is None
    sim.end(second)
    assert len(sim.answers["a", 0].tokens) == 2
    sim.check_idle()


def crowd(others, **params):
    """Sequence 0 with these parameters and `others` without, all of them decoding."""
    requests = [
        make_request(f"r{i}", 3 + i, max_tokens=12, ignore_eos=True, **(params if i == 0 else {}))
        for i in range(others + 1)
    ]
    sim = simulation(*requests, max_num_seqs=20, others_per_absent=10, max_num_batched_tokens=512)
    sim.step()
    return sim, requests


@pytest.mark.parametrize("params", [{"presence_penalty": 1.0}, {"repetition_penalty": 1.2}])
def test_who_depends_on_results_is_absent_from_the_step_ahead_and_in_the_next(params):
    sim, requests = crowd(10, **params)
    everyone = [(i, 0) for i in range(11)]
    flying = sim.begin()
    for expected in (everyone[1:], everyone) * 3:
        ahead = sim.begin(ahead=True)
        assert keys(ahead) == expected
        own = [row.token_ids[0] for row in ahead.rows if row.admission == 0]
        assert all(token >= 0 for token in own), "its last token is known by now"
        sim.end(flying)
        flying = ahead
    sim.run(ahead=True)
    for request in requests:
        sim.check_answer(request)


@pytest.mark.parametrize("params", [{"presence_penalty": 1.0}, {"n": 2, "presence_penalty": 0.5}])
def test_where_too_few_others_go_on_the_step_waits_for_all(params):
    sim, requests = crowd(9, **params)
    plan = sim.begin()
    assert len(plan.rows) == 9 + params.get("n", 1)
    assert sim.begin(ahead=True) is None
    sim.end(plan)
    sim.run(ahead=True)
    assert {row.admission for row in sim.plans[-1].rows} == set(range(10))
    for request in requests:
        sim.check_answer(request)


def test_the_absent_keep_their_share_of_the_budget():
    """Else those let in meanwhile would leave one of them without a token in the next step."""
    penalised = make_request("a", 1, max_tokens=9, ignore_eos=True, presence_penalty=1.0)
    others = [make_request(c, 1, max_tokens=9, ignore_eos=True) for c in "bcd"]
    sim = simulation(penalised, *others, max_num_batched_tokens=3)
    first, second = sim.begin(), sim.begin(ahead=True)
    assert keys(first) == [(0, 0), (1, 0), (2, 0)] and keys(second) == [(1, 0), (2, 0)]
    assert len(sim.scheduler.roster.running) == 3
    sim.end(first)
    sim.end(second)
    sim.run(ahead=True)
    for request in (penalised, *others):
        sim.check_answer(request)


@pytest.mark.parametrize(
    ("params", "starts"), [({"presence_penalty": 1.0}, [0, 64, 128]), ({"prompt_logprobs": 0}, [0])]
)
def test_a_prompt_in_parts_runs_ahead_unless_it_is_scored(params, starts):
    request = make_request("a", 150, max_tokens=2, **params)
    sim = simulation(request)
    plans = [sim.begin(), sim.begin(ahead=True)]
    if plans[1] is not None:
        sim.end(plans[0])
        plans.append(sim.begin(ahead=True))
    assert [plan.rows[0].start for plan in plans if plan is not None] == starts
    sim.run(ahead=True)
    sim.check_answer(request)


def test_a_sequence_that_stops_keeps_its_pages_until_the_step_ahead_is_done():
    free = answer_alone(make_request("a", max_tokens=50, ignore_eos=True), 0).tokens
    stopping = make_request("a", max_tokens=50, ignore_eos=True, stop_token_ids=(free[3],))
    sim = simulation(stopping, make_request("b", max_tokens=50, ignore_eos=True))
    while ("a", 0) not in sim.answers or sim.answers["a", 0].finish is None:
        sim.run_one(ahead=True)
    assert keys(sim.flying[0]) == [(0, 0), (1, 0)], "a row that is computed for nobody"
    assert sim.scheduler.statistics().pages_used == 2
    sim.run_one(ahead=True)
    assert sim.scheduler.statistics().pages_used == 1
    sim.run(ahead=True)
    sim.check_answer(stopping)
    sim.check_idle()


def test_heartbeats_carry_the_events_and_their_own_step_number():
    sim = simulation(make_request("a", max_tokens=1))
    sim.run()
    beat = sim.scheduler.heartbeat()
    sim.send(beat)
    assert (beat.rows, [e.kind for e in beat.events], beat.step) == ((), [EVICT], 1)
    stop = sim.scheduler.heartbeat(stop=True)
    assert (stop.events, stop.step, stop.stop) == ((), 2, True)
    assert stop.table_digest == beat.table_digest


@pytest.mark.parametrize("every", [1, 2, 5])
def test_forced_preemption_changes_no_answer_and_ends(every):
    requests = [make_request(c, 40 * i + 1, n=2, max_tokens=25, prompt_logprobs=0)
                for i, c in enumerate("abcdef")]  # fmt: skip
    sim = simulation(*requests, preempt_every=every, num_pages=4)
    sim.run(limit=20_000)
    for request in requests:
        sim.check_answer(request)
    assert sim.scheduler.statistics().preemptions > 10
    sim.check_idle()


def test_a_budget_smaller_than_the_decodes_still_ends():
    requests = [make_request(c, 9, max_tokens=12) for c in "abcde"]
    sim = simulation(*requests, max_num_batched_tokens=1)
    sim.run()
    for request in requests:
        sim.check_answer(request)


def test_statistics_count():
    sim = simulation(make_request("a", 10, n=2, max_tokens=5, ignore_eos=True),
                     make_request("b", 300, max_tokens=5), max_num_seqs=2)  # fmt: skip
    sim.step()
    now = sim.scheduler.statistics()
    assert (now.requests_running, now.requests_waiting) == (1, 1)
    assert (now.sequences_running, now.sequences_waiting) == (2, 1)
    assert (now.pages_used, now.pages_free, now.steps) == (2, 14, 1)
    assert (now.totals.prompt_tokens, now.totals.computed_tokens) == (310, 20)
    assert now.totals.generated_tokens == 2
    sim.run()
    assert now.totals.generated_tokens == 2, "a snapshot does not move"
    assert sim.scheduler.statistics().requests_finished == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.roster.ledger.pages.release(0),
        lambda s: s.roster.ledger.table.apply(s.roster.ledger._events or _nan(s)),
        lambda s: s.roster.running[0].__setattr__("pages", (1,)),
        lambda s: s.roster.running.remove(s.roster.running[0]),
        lambda s: s.roster.waiting.put(s.roster.running[0]),
        lambda s: s.roster.running[1].__setattr__("computed", 900),
        lambda s: s.roster.running[1].__setattr__("finished", True),
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
    from tpdet.plan import PageEvent

    sequence = scheduler.roster.running[0]
    return (PageEvent(NAN, sequence.pages[0], sequence.version_id),)


def test_the_simulation_itself_sees_a_wrong_page():
    """Negative control: with two page table entries swapped the answers must differ."""
    request = make_request("a", 400, max_tokens=6, ignore_eos=True)
    sim = simulation(request, max_num_batched_tokens=1000)
    (row,) = sim.begin().rows
    good = sim.ranks[0].read(row, 300)
    sim.ranks[0].store[[0, 1]] = sim.ranks[0].store[[1, 0]]
    ids = sim.ranks[0].store[list(row.pages)].reshape(-1)[:300]
    assert draw(ids, 1, 0) != draw(good, 1, 0)


def test_allocations_follow_the_evictions_they_reuse():
    sim = simulation(make_request("a", max_tokens=1), make_request("b", max_tokens=1), num_pages=1)
    sim.run()
    assert [(e.kind, e.page) for e in sim.plans[1].events] == [(EVICT, 0), (ALLOCATE, 0)]
