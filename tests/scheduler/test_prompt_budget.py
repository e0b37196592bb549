"""Prompts beside decoding rows are cut by what readers feel: relations of simulated loads."""

from functools import cache

import pytest

from tests.scheduler.load_simulation import (
    GRAPHS,
    LAUNCHES,
    MOST,
    PARTITION,
    ROW,
    Felt,
    Load,
    products,
    serve,
)
from tests.scheduler.simulated.answers import make_request
from tests.scheduler.simulated.requests import simulation
from tpdet.control.step_seconds import StepSeconds
from tpdet.kernels.cuda.hardware import A100, H100, H200
from tpdet.runner.start.step_estimate import estimate_steps
from tpdet.scheduler import prompt_budget
from tpdet.scheduler.prompt_budget import (
    LEAST_SPEED,
    MOST_SPEED,
    SPEED,
    WAITING_STEPS,
    PromptBudget,
    WaitingPrompts,
)
from tpdet.tools.worlds.shapes import cut_for, named_config

SECONDS = estimate_steps(PARTITION, H100, GRAPHS)
SHORT, LONG, MORE, LONGEST = (300, 512, 128), (100, 2048, 256), (250, 2048, 256), (60, 8192, 256)
"""Requests, prompt tokens and tokens of a load."""


@cache
def saturated(load: tuple[int, int, int], fine: bool) -> Felt:
    """All of 256 readers come again at once."""
    return serve(Load(*load), SECONDS if fine else None)


def at_random(load: tuple[int, int, int], share: float, seconds: StepSeconds | None) -> Felt:
    """A share of the requests a second that saturate the server."""
    rate = share * saturated(load, False).tokens_per_second / load[2]
    return serve(Load(*load, rate), seconds)


@cache
def before(load: tuple[int, int, int], share: float) -> Felt:
    """With one number of tokens for all steps in which somebody decodes."""
    return at_random(load, share, None)


@pytest.mark.parametrize(
    ("load", "share", "tail", "first"),
    [
        (SHORT, 0.8, 0.8, 1.04),
        (LONG, 0.8, 0.65, 1.06),
        pytest.param(SHORT, 0.5, 0.8, 1.04, marks=pytest.mark.slow),
        pytest.param(MORE, 0.5, 0.65, 1.06, marks=pytest.mark.slow),
        pytest.param(LONGEST, 0.5, 0.65, 1.05, marks=pytest.mark.slow),
        pytest.param(LONGEST, 0.8, 0.75, 1.05, marks=pytest.mark.slow),
    ],
)
def test_the_longest_gaps_are_shorter_and_first_tokens_and_throughput_as_before(
    load, share, tail, first
):
    old, new = before(load, share), at_random(load, share, SECONDS)
    assert new.gap(0.99) < tail * old.gap(0.99)
    assert new.gap(0.999) < 0.8 * old.gap(0.999) and max(new.gaps) < 0.8 * max(old.gaps)
    assert new.mean_first < first * old.mean_first
    assert new.tokens_per_second > 0.995 * old.tokens_per_second
    assert len(new.gaps) == len(old.gaps) and len(new.first) == load[0]


@pytest.mark.parametrize("load", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
def test_a_server_that_is_full_loses_nothing_by_it(load):
    old, new = saturated(load, False), saturated(load, True)
    assert new.tokens_per_second > 0.99 * old.tokens_per_second
    assert new.mean_first < 1.05 * old.mean_first
    assert new.gap(0.99) < old.gap(0.99)


@pytest.mark.parametrize(("speed", "broken"), [(0.6, "first"), (0.99, "tail")])
def test_another_share_of_the_speed_breaks_one_of_both(monkeypatch, speed, broken):
    """Negative control: finer chunks cost first tokens, coarser ones leave the gaps long."""
    for name in ("LEAST_SPEED", "SPEED", "MOST_SPEED"):
        monkeypatch.setattr(prompt_budget, name, speed)
    old, new = before(LONG, 0.8), at_random(LONG, 0.8, SECONDS)
    if broken == "first":
        assert new.mean_first > 1.06 * old.mean_first
    else:
        assert new.gap(0.99) > 0.65 * old.gap(0.99)


def test_prompts_are_read_whole_while_nobody_decodes_and_in_graphs_rows_while_somebody_does():
    rows = serve(Load(24, 6000, 40, rate=1.0), SECONDS).rows
    alone = [all_ for decoding, all_ in rows if not decoding]
    beside = {all_ for decoding, all_ in rows if 0 < decoding < all_}
    assert max(alone) > 6000 and max(beside) < 3000
    assert any(all_ in GRAPHS for all_ in beside), "padded for nothing"


def test_an_estimate_of_steps_is_near_the_times_that_were_measured():
    for rows in (192, 256, 512, 1024, 2048, 4096, 8192):
        measured = LAUNCHES + products(rows) + ROW * rows
        assert SECONDS.of(rows, 0, 0) == pytest.approx(measured, rel=0.08), rows
    assert SECONDS.of(64, 0, 0) == pytest.approx(LAUNCHES + products(64), rel=0.15)


@pytest.mark.parametrize("gpu", [A100, H100, H200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(
    ("name", "ranks"), [("qwen3-8b", 1), ("qwen3-8b", 4), ("qwen3-30b-a3b", 2)]
)
def test_prompts_keep_their_speed_beside_any_number_of_rows(name, ranks, gpu):
    """Experts too: few rows read nearly all of them, so their chunks are larger."""
    seconds = estimate_steps(cut_for(named_config(name), ranks, "tree"), gpu, GRAPHS)
    budget, chosen = PromptBudget(seconds), []
    for decoding in (1, 16, 64, 256):
        keys = 500 * decoding

        def speed(rows: int, depth: int, decoding: int = decoding, keys: int = keys) -> float:
            prompt = rows - decoding
            return prompt / seconds.of(rows, keys, prompt * depth)

        for depth in (0, 32_768):
            best = max(speed(each, depth) for each in GRAPHS if each > decoding)
            found = [
                budget.rows(decoding, keys, WaitingPrompts(first, depth, total), MOST)
                for first, total in ((9, 9), (MOST, MOST), (MOST, 1 << 20))
            ]
            assert found == sorted(found) and set(found) <= set(GRAPHS)
            for rows, share in zip(found, (LEAST_SPEED, SPEED, MOST_SPEED), strict=True):
                assert speed(rows, depth) >= share * best
            shorter = GRAPHS[GRAPHS.index(found[0]) - 1]
            assert shorter <= decoding or speed(shorter, depth) < LEAST_SPEED * best
        chosen.append(budget.rows(decoding, keys, WaitingPrompts(9, 0, 9), MOST))
        assert found[0] < chosen[-1], "a token far into a prompt takes longer"
    assert chosen == sorted(chosen)


def test_the_rows_of_a_step_end_at_the_limit_and_follow_what_waits():
    table = StepSeconds((8, 16, 32, 64, 128), (1.0, 1.0, 1.2, 2.0, 4.0), 0.0, 0.0)
    budget = PromptBudget(table)
    few, many = WaitingPrompts(10, 0, 10), WaitingPrompts(100, 0, 1 << 20)
    assert budget.rows(4, 0, few, 128) == 64, "30 of 31 a second"
    assert budget.rows(4, 0, few, 32) == 32 and budget.rows(4, 0, few, 20) == 16
    assert budget.rows(200, 0, few, 300) == 300, "no graph is larger"
    slow = StepSeconds((8, 16, 32, 64, 128), (1.4, 2.0, 2.9, 5.25, 9.8), 0.0, 0.0)
    budget = PromptBudget(slow)
    least, longest = (budget.rows(1, 0, each, 128) for each in (few, many))
    assert (least, longest) == (32, 128)
    assert budget.rows(1, 0, WaitingPrompts(60, 0, 60), 128) == 64, "not cut"
    assert budget.rows(1, 0, WaitingPrompts(9, 0, WAITING_STEPS * 70), 128) == 128


def test_no_answer_depends_on_where_prompts_are_cut():
    requests = [make_request(f"r{i}", 90 + 37 * i, max_tokens=6, ignore_eos=True) for i in range(8)]
    cuts = []
    for seconds in (None, StepSeconds((16, 32, 200), (1.0, 1.1, 9.0), 0.0, 1e-4)):
        sim = simulation(*requests, num_pages=60, max_num_batched_tokens=200, step_seconds=seconds)
        sim.run()
        for each in requests:
            sim.check_answer(each)
        cuts.append([len(row.token_ids) for plan in sim.plans for row in plan.rows])
    assert max(cuts[0]) > 32 and cuts[0] != cuts[1]
