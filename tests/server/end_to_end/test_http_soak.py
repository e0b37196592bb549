"""Three equal storms of ten minutes in all: the HTTP process is no larger after the third.

TPDET_SOAK_SECONDS makes them shorter or longer.
"""

import asyncio
import os
import time
from collections import Counter
from statistics import median

import pytest

from tests.lib.server.harness import Server, eventually
from tests.server.end_to_end.storm import storm
from tests.server.streams import running
from tpdet.server.front.memory import SECONDS as TRIM_SECONDS

pytestmark = pytest.mark.alone
SECONDS = float(os.environ.get("TPDET_SOAK_SECONDS", "600"))
STORMS, GROWTH = 3, 0.05


def resident_when_quiet(server: Server) -> float:
    """Memory in MiB of the HTTP process alone, once nobody asks."""
    eventually(lambda: running(server) == 0, 30)
    time.sleep(2 * TRIM_SECONDS + 1)
    values = []
    for _ in range(5):
        time.sleep(0.5)
        values.append(server.child.memory_info().rss / 2**20)
    return median(values)


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS + 300)
def test_the_http_process_is_no_larger_after_the_third_of_three_equal_storms(tmp_path):
    server = Server(tmp_path, "--max-model-len", "8192")
    try:
        before, bits = server.child.memory_info().rss / 2**20, server.canary()
        asked, sizes = three_storms(server)
        print(f"\n{before:.1f} MiB at start, after each storm {sizes} MiB; each asked {asked}")
        assert server.canary() == bits
        assert sizes[-1] < (1 + GROWTH) * sizes[0]
    finally:
        code = server.stop()
    assert code == 0, server.log.read_text()


def three_storms(server: Server) -> tuple[dict[str, int], list[float]]:
    """What each storm asked, and MiB after each; the first lasts a third of the time."""
    deadline = time.monotonic() + SECONDS / STORMS
    asked: Counter[str] = Counter()
    seeds = 0
    while time.monotonic() < deadline or not seeds:
        asked += asyncio.run(storm(server.port, 1, seeds))
        seeds += 1
    sizes = [resident_when_quiet(server)]
    for _ in range(1, STORMS):
        for seed in range(seeds):
            asyncio.run(storm(server.port, 1, seed))
        sizes.append(resident_when_quiet(server))
    return dict(asked), sizes
