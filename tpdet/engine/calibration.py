"""Measures at start how long decode steps take, by requests that the engine makes."""

import logging
import random
from typing import TYPE_CHECKING

from tpdet.engine.slowdown import PAGES, ROWS, Cell, SlowdownWatch
from tpdet.errors import UsageError
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.requests.request import Request, SamplingParams

if TYPE_CHECKING:
    from tpdet.engine.engine import Engine

STEPS = 20
MAX_PAGES = 256
"""Pages of all prompts together, at most: calibration is to take seconds."""

_log = logging.getLogger("tpdet.engine")


def calibrate(engine: "Engine", watch: SlowdownWatch) -> None:
    """Time every cell that the engine has room for; its context is as long as the cell allows.

    To be called on rank 0 when nothing else runs. Raises UsageError when there is room for none.
    """
    _log.info("calibrating decode steps")
    done = []
    policy = engine.scheduler.policy
    budget, policy.prompt_budget = policy.prompt_budget, None  # the sooner all rows decode
    engine.scheduler.speculator.paused = True
    for cell in _cells(engine):
        if _run(engine, watch, cell):
            done.append(cell)
    engine.scheduler.speculator.paused = False
    policy.prompt_budget = budget
    engine.scheduler.forget_prefixes()
    if not done:
        raise UsageError(
            "on_slowdown: the engine has no room for a decode step to calibrate by: raise "
            "max_model_len or kv_pages"
        )
    _log.info("decode steps are calibrated for (rows, pages a row): %s", done)


def _cells(engine: "Engine") -> list[Cell]:
    most = min(engine.scheduler.policy.max_num_seqs, engine.config.max_queue, ROWS[-1])
    heights = sorted({*(rows for rows in ROWS if rows < most), most})
    room = min(MAX_PAGES, engine.runner.num_pages)
    return [(rows, pages) for rows in heights for pages in PAGES if rows * pages <= room]


def _run(engine: "Engine", watch: SlowdownWatch, cell: Cell) -> bool:
    """Whether a cell could be calibrated."""
    rows, pages = cell
    if pages > 1 and pages * PAGE_TOKENS > engine.max_model_len:
        return False
    context = min(pages * PAGE_TOKENS, engine.max_model_len)
    free = max(1, engine.scheduler.policy.mixed_step_tokens - rows)  # others decode beside
    tokens = STEPS + -(-rows * context // free)
    if tokens >= context:
        return False
    vocab_size, choose = engine.model_config.vocab_size, random.Random(f"{cell}")
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=1)
    watch.start_sample(rows)
    for index in range(rows):
        ids = tuple(choose.randrange(vocab_size) for _ in range(context - tokens))
        name = f"calibration-{rows}-{pages}-{index}"
        engine.submit(Request(request_id=name, prompt_token_ids=ids, params=params))
    while engine.has_work:
        engine.step()
    return watch.end_sample(cell, STEPS // 2)
