"""Plans of the scheduler: which rows a step computes, in which order, and what they hold."""

import subprocess
import sys

from tests.scheduler.simulated.answers import draw, make_request
from tests.scheduler.simulated.requests import keys, simulation
from tpdet.cache.versions import version_id
from tpdet.control.plan import EVICT


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


def test_the_params_of_a_row_hold_what_the_token_may_depend_on():
    request = make_request(
        "a",
        4,
        n=2,
        seed=99,
        max_tokens=9,
        ignore_eos=True,
        presence_penalty=1.0,
        logit_bias={3: 1.0},
    )
    sim = simulation(request)
    sim.step()
    sim.preempt_all()
    plan = sim.begin()
    row = sim.scheduler.latest(plan).wanted()[0][1]
    assert plan.rows[1].start == 0
    assert (row.seed, row.choice, row.position, row.presence_penalty) == (99, 1, 5, 1.0)
    first = sim.answers["a", 1].tokens
    assert (list(row.output_ids), list(row.prompt_ids), row.bias) == (first, [], {3: 1.0})
    plain = simulation(make_request("b", 4))
    how = plain.scheduler.latest(plain.begin()).wanted()[0][0]
    assert not how.output_ids and not how.prompt_ids and not how.changes_logits
    repeated = simulation(make_request("b", 4, repetition_penalty=1.2))
    how = repeated.scheduler.latest(repeated.begin()).wanted()[0][0]
    assert len(how.prompt_ids) == 4 and not how.output_ids


def test_heartbeats_carry_the_events_and_their_own_step_number():
    sim = simulation(make_request("a", max_tokens=1))
    sim.run()
    beat = sim.scheduler.heartbeat()
    sim.send(beat)
    assert (len(beat.rows), [e.kind for e in beat.events], beat.step) == (0, [EVICT], 1)
    stop = sim.scheduler.heartbeat(stop=True)
    assert (stop.events, stop.step, stop.stop) == ((), 2, True)
    assert stop.table_digest == beat.table_digest


def test_a_budget_smaller_than_the_decodes_still_ends():
    requests = [make_request(c, 9, max_tokens=12) for c in "abcde"]
    sim = simulation(*requests, max_num_batched_tokens=1)
    sim.run()
    for request in requests:
        sim.check_answer(request)


def test_statistics_count():
    sim = simulation(
        make_request("a", 10, n=2, max_tokens=5, ignore_eos=True),
        make_request("b", 300, max_tokens=5),
        max_num_seqs=2,
    )
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


def test_the_simulation_itself_sees_a_wrong_page():
    """Negative control: with two page table entries swapped the answers must differ."""
    request = make_request("a", 400, max_tokens=6, ignore_eos=True)
    sim = simulation(request, max_num_batched_tokens=1000)
    (row,) = sim.begin().rows
    good = sim.ranks[0].read(row, 300)
    sim.ranks[0].store[[0, 1]] = sim.ranks[0].store[[1, 0]]
    ids = sim.ranks[0].store[list(row.pages)].reshape(-1)[:300]
    assert draw(ids, 1, 0) != draw(good, 1, 0)


def test_prompts_beside_decodes_take_no_more_than_a_mixed_step_has():
    def steps(mixed):
        requests = [
            make_request(f"r{i}", 90 + 7 * i, max_tokens=6, ignore_eos=True) for i in range(8)
        ]
        sim = simulation(
            *requests, num_pages=40, max_num_batched_tokens=200, mixed_step_tokens=mixed
        )
        sim.run()
        for each in requests:
            sim.check_answer(each)
        found = {True: [], False: []}
        for plan in sim.plans:
            decodes = any(len(row.token_ids) == 1 for row in plan.rows)
            found[decodes].append(sum(len(row.token_ids) for row in plan.rows))
        return found

    short, long = steps(40), steps(None)
    assert max(short[True]) == 40 and max(short[False]) == 200
    assert max(long[True]) == 200, "without a limit a mixed step is as large as any"


def test_decodes_over_the_limit_of_a_mixed_step_all_run():
    requests = [make_request(f"r{i}", 3, max_tokens=9, ignore_eos=True) for i in range(8)]
    late = make_request("late", 60, max_tokens=2)
    sim = simulation(*requests, late, num_pages=40, max_num_seqs=9, mixed_step_tokens=4)
    assert sim.run() < 40
    assert any(len(plan.rows) == 8 for plan in sim.plans)
    sim.check_answer(late)
