"""A server that got slow: it changes to approximate arithmetic if asked, once, never unasked."""

import logging

import pytest

from tests.lib.engine_harness import ask, small_config
from tests.lib.thread_world import run_threads
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.control import plan as plan_module
from tpdet.control.plan import PlanRows, Row, StepPlan
from tpdet.engine import Engine
from tpdet.engine.slowdown import WINDOW, SlowdownWatch
from tpdet.errors import UsageError
from tpdet.requests.request import TokenOutput

pytestmark = pytest.mark.long

TASKS = [range(7, 7 + n) for n in (40, 60, 9)]


class Clock:
    """A clock on which every look takes `seconds`."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def tokens(outputs, name):
    return [o for o in outputs if isinstance(o, TokenOutput) and o.request_id == name]


def serve(model, tp, slow_after, ahead=False, **settings):
    """Rank 0's (outputs, engine facts) of requests among which the clock gets slow.

    slow_after: steps of the first wave after which every look at the clock takes twice as long.
    """
    clock = Clock()

    def one_rank(world):
        small = small_config(model, max_num_seqs=2, max_model_len=256, **settings)
        engine = Engine(small, world, clock=clock, run_ahead=ahead)
        if world.rank > 0:
            engine.worker_loop()
            return engine.approximate
        engine.calibrate()
        found = {"outputs": [], "versions": [], "before": engine.arithmetic.contract}
        found["strict"] = engine.system_fingerprint
        engine.submit(ask("early", TASKS[0], max_tokens=2))
        engine.submit(ask("a", TASKS[1], max_tokens=60))
        engine.submit(ask("b", TASKS[2], max_tokens=60, temperature=0.8, seed=3))
        steps = 0
        while engine.has_work:
            clock.seconds = 1.0 if steps < slow_after else 2.0
            steps += 1
            found["outputs"] += engine.step()
            table = engine.scheduler.policy.page_manager.table
            found["versions"].append([table.version(page) for page in range(table.num_pages)])
            engine.scheduler.policy.check_integrity([])
        engine.submit(ask("after", TASKS[1], max_tokens=4))
        while engine.has_work:
            found["outputs"] += engine.step()
        engine.heartbeat()
        found["after"], found["gauges"] = engine.arithmetic.contract, engine.gauges
        found["fingerprint"] = engine.system_fingerprint
        engine.stop_workers()
        return found

    if tp == 1:
        return one_rank(SoloWorld()), None
    return run_threads(tp, one_rank, timeout=120.0)


@pytest.mark.parametrize(("tp", "ahead"), [(1, False), (2, True)])
def test_a_slow_clock_changes_to_it_when_asked(tiny_model, caplog, tp, ahead):
    model = tiny_model("qwen3", kv_heads=2)
    caplog.set_level(logging.ERROR, "tpdet.engine")
    found, other = serve(model, tp, 20, ahead, on_slowdown="approximate", max_slowdown=0.3)
    assert other in (None, True)
    (alarm,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "APPROXIMATE from now on" in alarm.message and "50 % of the speed" in alarm.message
    assert found["gauges"].pop("start_seconds") > 0
    assert found["gauges"] == {"approximate": 1.0, "slowdown_ratio": pytest.approx(2.0)}
    assert found["fingerprint"] != found["strict"]
    assert found["after"].startswith("approximate-") and found["fingerprint"] in alarm.message
    assert not any(o.approximate for o in tokens(found["outputs"], "early"))
    for name in ("a", "b"):
        marks = [o.approximate for o in tokens(found["outputs"], name)]
        assert len(marks) == 60 and not marks[20] and marks[-1]
        assert marks == sorted(marks)  # strict, then approximate, and never back
    assert all(o.approximate for o in tokens(found["outputs"], "after"))
    # Every page changed at once: none that strict arithmetic wrote can be read afterwards.
    changed = [
        all(new > old for old, new in zip(one, two, strict=True))
        for one, two in zip(found["versions"], found["versions"][1:], strict=False)
    ]
    assert changed.count(True) == 1


@pytest.mark.parametrize(
    ("settings", "slow_after"),
    [({}, 0), ({"on_slowdown": "approximate"}, 10_000),
     ({"on_slowdown": "approximate", "max_slowdown": 0.6}, 20)],
)  # fmt: skip
def test_unasked_or_fast_enough_it_stays_strict(tiny_model, caplog, settings, slow_after):
    found, _ = serve(tiny_model("qwen3", kv_heads=2), 1, slow_after, **settings)
    assert not any(o.approximate for o in found["outputs"])
    assert found["gauges"]["approximate"] == 0.0 and found["before"] == found["after"]
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_pages_of_strict_steps_are_not_read_after_the_change(tiny_model):
    """Whatever lies in the pages at the change, the approximate answers are the same."""
    model, prompt = tiny_model("qwen3", kv_heads=2), range(20, 620)

    def answer(change, ruin):
        engine = Engine(small_config(model, on_slowdown="approximate"), SoloWorld())
        engine.submit(ask("first", prompt))
        for _ in range(6):
            engine.step()
        assert engine.scheduler.policy.running
        engine.watch.slow = "the test says so" if change else None
        for layer in engine.runner.pages.layers if ruin else ():
            layer.values.fill_(7.0)
        engine.submit(ask("second", prompt))
        found = []
        while engine.has_work:
            found += engine.step()
        assert sum(o.cached_tokens for o in tokens(found, "second")) == 512
        assert all(o.approximate == change for o in found)
        return [(o.request_id, o.token_id, o.logprob) for o in found]

    assert answer(change=True, ruin=True) == answer(change=True, ruin=False)
    # Negative control: without the change the pages are read.
    assert answer(change=False, ruin=True) != answer(change=False, ruin=False)


def row(rows, start=0, draws=True, count=1):
    found = [Row(i, 0, 1, start, (1,) * count, (0,), (1,), 1, draws) for i in range(rows)]
    return PlanRows.of(found)


def steps(watch, clock, rows, seconds, count=WINDOW, **fields):
    for _ in range(count):
        clock.seconds = seconds
        watch.begin(pending=False)
        plan = StepPlan(plan_module.PLAN_VERSION, 0, (), rows, b"", **fields)
        watch.end(plan, synchronous=True)


def calibrated(cells):
    clock = Clock()
    watch = SlowdownWatch(0.3, clock)
    for (count, pages), seconds in cells.items():
        watch.start_sample(count)
        steps(watch, clock, row(count), seconds)
        steps(watch, clock, row(count + 1), 50.0)  # not of this cell
        assert watch.end_sample((count, pages), WINDOW)
    return watch, clock


def test_only_decode_steps_of_a_calibrated_cell_are_judged():
    watch, clock = calibrated({(4, 1): 1.0, (16, 1): 2.0})
    steps(watch, clock, row(4, start=256), 9.0)  # more context
    steps(watch, clock, row(17), 9.0)  # more rows
    steps(watch, clock, row(4, count=3), 9.0)  # a prompt
    steps(watch, clock, row(4, draws=False), 9.0)
    steps(watch, clock, row(4), 9.0, approximate=True)
    steps(watch, clock, row(0), 9.0)
    assert watch.ratio is None and watch.slow is None
    steps(watch, clock, row(5), 2.8)
    assert watch.ratio == pytest.approx(1.4) and watch.slow is None
    steps(watch, clock, row(3), 1.5, count=WINDOW - 1)
    assert watch.slow is None  # not yet
    steps(watch, clock, row(3), 1.5, count=1)
    assert "up to 4 rows and 1 pages a row took 1500.00 ms" in watch.slow


def test_a_hiccup_is_no_slowdown_and_pending_steps_are_timed_from_the_last_end():
    watch, clock = calibrated({(4, 1): 1.0})
    steps(watch, clock, row(4), 1.0)
    steps(watch, clock, row(4), 60.0, count=WINDOW // 2 - 1)
    steps(watch, clock, row(4), 1.0, count=3)
    assert watch.slow is None and watch.ratio == pytest.approx(1.0)
    watch.start_sample(2)
    clock.seconds = 3.0
    watch.begin(pending=True)
    watch.end(StepPlan(plan_module.PLAN_VERSION, 0, (), row(2), b""), synchronous=True)
    assert watch._sample == (2, [3.0])
    assert not watch.end_sample((2, 1), 2)


def test_no_room_to_calibrate_is_refused(tiny_model):
    small = EngineConfig.from_values(
        model=str(tiny_model()), kv_pages=2, max_model_len=16, on_slowdown="approximate"
    )
    with pytest.raises(UsageError, match="no room for a decode step to calibrate by"):
        Engine(small, SoloWorld()).calibrate()
