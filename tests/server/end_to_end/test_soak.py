"""Ten minutes of load, a twentieth of which goes away: nothing grows, and no answer changes.

TPDET_SOAK_SECONDS makes it shorter or longer.
"""

import asyncio
import os
import random
import time
from statistics import median

import pytest

from tests.server.end_to_end.load_client import QUESTIONS, Footprint, ask, golden, leave, settle
from tests.server.end_to_end.test_end_to_end import Served

pytestmark = pytest.mark.alone
SECONDS = float(os.environ.get("TPDET_SOAK_SECONDS", "600"))
PAGES, SEATS, WORKERS = 40, 4, 6
ABORTED = 0.05
MEMORY_SLACK = 24 << 20


async def soak(port: int, everyone: list, seconds: float) -> tuple[list[Footprint], int, int]:
    """Footprints over time, how many were answered, how many went away."""
    expected = await golden(port)
    deadline = time.monotonic() + seconds
    prints: list[Footprint] = []
    counts = {"answered": 0, "aborted": 0}

    async def worker(name: int) -> None:
        random_ = random.Random(name)
        while time.monotonic() < deadline:
            number = random_.randrange(len(QUESTIONS))
            if random_.random() < ABORTED:
                await leave(port, number, random_.choice((1, 400, 2000)))
                counts["aborted"] += 1
                continue
            reply = await ask(port, number)
            assert reply.status == 200, reply
            assert reply.bits == expected[number]
            counts["answered"] += 1

    async def watch() -> None:
        while time.monotonic() < deadline:
            await asyncio.sleep(seconds / 60)
            prints.append(Footprint.of(everyone))

    await asyncio.gather(watch(), *(worker(name) for name in range(WORKERS)))
    await settle(port, PAGES)
    assert await golden(port) == expected
    return prints, counts["answered"], counts["aborted"]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_a_soak_leaves_no_growth(tiny_model, tmp_path):
    flags = ("--max-num-seqs", str(SEATS), "--kv-pages", str(PAGES), "--max-model-len", "512")
    served = Served(tiny_model("qwen3", kv_heads=2), tmp_path, 1, *flags)
    port = int(served.ready["url"].rsplit(":", 1)[1])
    try:
        prints, answered, aborted = asyncio.run(soak(port, served.everyone, SECONDS))
    finally:
        code = served.end()
    assert code == 0, served.log.read_text()
    assert answered > SECONDS and aborted > 0.02 * answered
    early, late = prints[10:25], prints[-15:]
    for index in range(len(served.everyone)):
        former = median(found.memory[index] for found in early)
        latter = median(found.memory[index] for found in late)
        print(f"process {index}: {former / 2**20:.1f} MiB, then {latter / 2**20:.1f} MiB")
        assert latter - former < MEMORY_SLACK
    print(f"{answered} answered, {aborted} went away, {late[-1].files} files open")
    assert median(f.files for f in late) <= median(f.files for f in early) + WORKERS
