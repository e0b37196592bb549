"""Prompt scores: which rows give them, and that each is told once."""

from tests.scheduler.simulated.answers import make_request
from tests.scheduler.simulated.requests import simulation


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
            sim.preempt_all()
        sim.step()
    sim.check_answer(request)
    assert sim.scheduler.statistics().preemptions == 3
    scored = [row.logits for plan in sim.plans for row in plan.rows]
    assert sum(scored) == 300 + 3, "no position is scored twice"


def test_only_the_last_tokens_of_a_prompt_are_scored_where_they_alone_are_asked_for():
    fields = {"max_tokens": 3, "prompt_logprobs": 1, "ignore_eos": True}
    request = make_request("a", 300, prompt_logprobs_last_n=40, **fields)
    sim = simulation(request)
    for step in range(40):
        if step in (2, 5, 6):
            sim.preempt_all()
        sim.step()
    scores = sim.prompt_outputs["a"]
    assert [score is None for score in scores.logprobs] == [True] * 260 + [False] * 40
    assert scores.ranks[:260] == (0,) * 260
    scored = [row.logits for plan in sim.plans for row in plan.rows]
    assert sum(scored) == 41 + 2, "no position is scored twice, and none in vain"
