"""What the default number of tokens a step costs: KV pages, and the longest wait for a token.

    python -m scripts.gpu_times.engine.step_tokens [--shape qwen3-8b] [--tp 1,2]
        [--max-model-len 8192]

A world of ranks with random weights starts twice, with 2,048 tokens a step and with the default.
The rows are the KV pages of both, the share of them that the default takes, and milliseconds of
steps that read one prompt while a sequence decodes, beside the estimate: of as many rows as there
may be, and of those that its reader is to wait for. Fails where the default takes more than 2 % of
the pages, or where a step takes a quarter longer than the estimate.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.comm.device import open_world
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.kernels.cuda.hardware import NO_GPU, gpu_of
from tpdet.layers.partition import make_partition
from tpdet.requests.request import Request, SamplingParams
from tpdet.runner.start.step_estimate import step_seconds
from tpdet.runner.start.step_tokens import CACHE_SHARE, LEAST_TOKENS
from tpdet.scheduler.prompt_budget import WaitingPrompts
from tpdet.tools.bench.load import prompt
from tpdet.tools.worlds.lists import parse_sizes
from tpdet.tools.worlds.worlds import run_world

TURNS, STEPS, WARM = 5, 40, 4
LONGER = 1.25


def greedy(name: str, ids: tuple[int, ...], tokens: int) -> Request:
    """A request for exactly so many tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=ids, params=params)


def longest_wait(engine: Engine, rows: int, turn: int) -> float:
    """Seconds between two tokens of a sequence while a prompt fills a step of so many rows."""
    vocabulary, length = engine.model_config.vocab_size, min(rows, engine.max_model_len) - 1
    engine.submit(greedy(f"reader-{turn}", prompt(8, vocabulary, f"reader-{turn}"), STEPS))
    ends: list[float] = []
    while engine.has_work:
        engine.step()
        ends.append(time.perf_counter())
        if len(ends) == WARM:
            engine.submit(greedy(f"long-{turn}", prompt(length, vocabulary, f"long-{turn}"), 1))
    return max(after - before for before, after in pairwise(ends))


def rows_beside_one(engine: Engine) -> list[int]:
    """Rows of a step beside one decoding row: those that a long prompt gets, and the most."""
    policy = engine.scheduler.policy
    budget, most = policy.prompt_budget, policy.mixed_step_tokens
    policy.prompt_budget = None  # the prompts of this measurement are as long as a step
    return (
        [most]
        if budget is None
        else [budget.rows(1, WARM, WaitingPrompts(most, 0, most), most), most]
    )


def step_of(engine: Engine, rows: int) -> dict[str, float]:
    """Milliseconds of a step of so many rows, measured and estimated."""
    partition = make_partition(engine.model_config, engine.world, engine.config.fold_order, None)
    gpu = gpu_of(engine.runner.device)
    estimate = 0.0 if gpu == NO_GPU else step_seconds(partition, gpu, rows)
    waits = [longest_wait(engine, rows, turn) for turn in range(TURNS)]
    return {"rows": rows, "ms": 1e3 * statistics.median(waits), "estimate": 1e3 * estimate}


def rank(model: str, tokens: int, context: int, out: Path) -> None:
    """One rank: start, and for the default (0) time the steps; rank 0 writes what it saw."""
    given = {"max_num_batched_tokens": tokens} if tokens else {}
    config = EngineConfig.from_values(
        model=model, load_format="dummy", max_model_len=context, **given
    )
    world = open_world(config.device, config.step_timeout)
    engine = Engine(config, world)
    found = {"pages": engine.runner.num_pages, "tokens": str(engine.runner.step_tokens)}
    if world.rank > 0:
        engine.worker_loop()
    else:
        if not tokens:
            found["steps"] = [step_of(engine, rows) for rows in rows_beside_one(engine)]
        engine.stop_workers()
        out.write_text(json.dumps(found))
    world.barrier()
    engine.close()


def compare(model: str, tp: int, context: int, folder: Path) -> bool:
    """Start both worlds, print the rows; whether the default keeps its promises."""
    found = []
    for tokens in (LEAST_TOKENS, 0):
        out = folder / f"{tp}-{tokens}.json"
        arguments = ["--rank", model, str(tokens), str(context), str(out)]
        run_world(tp, "scripts.gpu_times.engine.step_tokens", arguments, folder)
        found.append(json.loads(out.read_text()))
    small, usual = found
    share = 1 - usual["pages"] / small["pages"]
    quick = all(each["ms"] <= LONGER * each["estimate"] for each in usual["steps"])
    sound = share <= CACHE_SHARE and quick
    row = {"tp": tp, "pages at 2048": small["pages"], "share": round(share, 4), **usual}
    print(json.dumps(row | {"sound": sound}), flush=True)
    return sound


def main(arguments: list[str]) -> int:
    """Every size; 1 where one does not keep its promises."""
    if arguments[:1] == ["--rank"]:
        rank(arguments[1], int(arguments[2]), int(arguments[3]), Path(arguments[4]))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_times.engine.step_tokens", allow_abbrev=False
    )
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--tp", default="1")
    parser.add_argument("--max-model-len", type=int, default=8192)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tpdet-steps-") as name:
        folder = Path(name)
        model = str(write_shape(folder / options.shape, options.shape))
        each = [compare(model, tp, options.max_model_len, folder) for tp in parse_sizes(options.tp)]
    return 0 if all(each) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
