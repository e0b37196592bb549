"""The alarm on a swinging batch size: what counts as a swing, and that operators hear of it."""

import concurrent.futures

import pytest

from tests.lib.server.harness import Server, eventually
from tpdet.server.front.load_lines import BatchSwing
from tpdet.server.front.metrics import Metrics
from tpdet.server.settings.settings import load_settings
from tpdet.server.wire.protocol import Status

pytestmark = pytest.mark.long
ALARM = "batch size swings"


class Windows:
    """A swing watched over windows of (steps, sequences a step)."""

    def __init__(self, alarm: float):
        self.totals = {"batches": 0.0, "batched_rows": 0.0}
        self.metrics = Metrics("m", self.status)
        self.swing = BatchSwing(self.metrics, self.status, alarm)

    def status(self) -> Status:
        return Status("accepting", 0, 0, dict(self.totals))

    def window(self, steps: int, size: float) -> str | None:
        self.totals["batches"] += steps
        self.totals["batched_rows"] += steps * size
        return self.swing.line()

    def metric(self, name: str) -> float:
        lines = self.metrics.render().decode().splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


def test_a_window_counts_when_the_mean_batch_size_changes_by_more_than_the_share():
    watched = Windows(0.1)
    assert watched.window(100, 40) is None, "there is nothing before the first"
    assert watched.window(7, 44) is None, "10 % is not over 10 %"
    assert watched.metric("tpdet_batch_swing") == pytest.approx(0.1)
    assert "39.5 sequences a step on average, 44.0" in watched.window(50, 39.5)
    assert watched.metric("tpdet_batch_swing_alarms_total") == 1
    assert "10 % is over the alarm" in watched.window(50, 43.5)
    assert watched.metric("tpdet_batch_swing_alarms_total") == 2


def test_idle_windows_are_left_out():
    watched = Windows(0.1)
    watched.window(10, 8)
    for _ in range(3):
        assert watched.window(0, 0) is None
    assert watched.window(10, 8) is None
    assert watched.window(10, 4) is not None


def test_an_alarm_of_0_is_never_but_the_metric_goes_on():
    watched = Windows(0.0)
    watched.window(10, 8)
    assert watched.window(10, 80) is None
    assert watched.metric("tpdet_batch_swing") == 9.0
    assert watched.metric("tpdet_batch_swing_alarms_total") == 0


def test_there_is_no_alarm_unless_asked_for_and_a_fixed_batch_never_swings():
    assert load_settings(["m"], "t").batch_swing_alarm == 0.0
    assert load_settings(["m", "--batch-swing-alarm", "0.5"], "t").batch_swing_alarm == 0.5
    fixed = ["m", "--fixed-batch", "8", "--batch-swing-alarm", "0.5"]
    assert load_settings(fixed, "t").batch_swing_alarm == 0.0


ASKED = ("--batch-swing-alarm", "0.1")


@pytest.mark.parametrize(
    ("flags", "alarmed"), [(ASKED, True), ((), False), ((*ASKED, "--fixed-batch", "6"), False)]
)
def test_a_server_whose_load_doubles_logs_it_and_counts_it(tmp_path, flags, alarmed):
    server = Server(tmp_path, *flags, limits={"STATISTICS_SECONDS": 0.4})
    slow = {"cache_salt": "slow=0.02", "ignore_eos": True}
    try:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(server.complete, max_tokens=110, **slow)]
            eventually(lambda: server.metric("tpdet_requests_running") == 1)
            eventually(lambda: "throughput" in server.log.read_text())
            futures += [pool.submit(server.complete, max_tokens=50, **slow) for _ in range(5)]
            assert {future.result().status_code for future in futures} == {200}
        assert (ALARM in server.log.read_text()) is alarmed
        assert (server.metric("tpdet_batch_swing_alarms_total") > 0) is alarmed
    finally:
        assert server.stop() == 0
