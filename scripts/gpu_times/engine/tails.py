"""What readers feel: prompts cut beside decoding rows, and drafts that never help; in turn.

    python -m scripts.gpu_times.engine.tails [loads] [drafts] [--shape qwen3-8b] [--rounds 2]
        [--seconds 6]

One engine of one GPU with random weights, temperature 1, whose steps this program drives as the
server's loop does. It prints a JSON line for each part, within 200 s for both on an H100.

loads: requests at random, lengths +-50 %, at shares of the rate that saturates a simulated H100.
`before` has no prompt budget, so one number of tokens for all steps in which somebody decodes, as
with `--max-num-batched-tokens`; `now` is the default. Rounds in turn are pooled. The last line has
steps with prompts by rows: how many, median milliseconds, and the estimate without attention.

drafts: seconds of a call, each in every one of eleven rounds: without drafts, with `auto`, with a
drafter that always has drafts and is never right, and without again. Ratios are to the mean of
both calls without, `control` is the last by the first; the first round's stand apart.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.scheduler.load_simulation import Felt, Load, serve
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.requests.request import Request, SamplingParams, TokenOutput
from tpdet.scheduler.prompt_budget import PromptBudget
from tpdet.scheduler.sequence import Sequence
from tpdet.scheduler.speculator import Speculator
from tpdet.speculative.speculator import DraftSpeculator
from tpdet.tools.bench.load import prompt, run_all, submit

CELLS = (((512, 128), 0.5), ((512, 128), 0.8), ((2048, 256), 0.8))
"""Prompt tokens and tokens of a request, and the share of the rate that saturates an H100."""
SATURATING = 250  # requests of the simulated H100 whose 256 readers come again at once
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999, "longest": 1.0}
CALLS, PROMPT = {1: 48, 16: 48, 64: 32, 256: 24}, 16
"""Tokens of a call by the number of its requests, and of a prompt."""
ROUNDS, RESAMPLED = 10, 2000


class Steps:
    """Seconds of steps with prompts, by the rows of the graph that holds them."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._table = engine, engine.runner.step_tokens.seconds
        self._computed, self.ended = 0, 0.0
        self.seconds: dict[int, list[float]] = {}

    def end(self, tokens: int, now: float) -> None:
        """A step has ended in which so many tokens were sampled."""
        before, self._computed = self._computed, self._engine.statistics().totals.computed_tokens
        rows, took, self.ended = self._computed - before, now - self.ended, now
        if self._table is not None and before and tokens < rows <= self._table.rows[-1]:
            graph = self._table.rows[bisect_left(self._table.rows, rows)]
            self.seconds.setdefault(graph, []).append(took)

    def beside_estimates(self) -> dict[int, tuple[int, float, float]]:
        """How many steps, their median milliseconds, and those estimated without attention."""
        return {
            rows: (len(took), 1e3 * statistics.median(took), 1e3 * self._table.of(rows, 0, 0))
            for rows, took in sorted(self.seconds.items())
            if self._table is not None
        }


def send(engine: Engine, load: Load, name: str, steps: Steps) -> Felt:
    """Send the requests when they are due, and note when their tokens come."""
    felt, came, last = Felt(), {}, {}
    vocabulary, open_ = engine.model_config.vocab_size, 0
    arrivals = [
        (due, prompt(length, vocabulary, f"{name}-{i}"), tokens)
        for i, (due, length, tokens) in enumerate(load.arrivals())
    ][::-1]
    begin = time.perf_counter()
    while arrivals or open_:
        now = time.perf_counter() - begin
        while arrivals and arrivals[-1][0] <= now:
            due, ids, tokens = arrivals.pop()
            identity = f"{name}-{len(came)}"
            params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
            engine.submit(Request(request_id=identity, prompt_token_ids=ids, params=params))
            came[identity] = due
            open_ += 1
        if not open_:
            time.sleep(max(0.0, arrivals[-1][0] - now))
            steps.ended = time.perf_counter() - begin
            continue
        outputs = engine.step()
        felt.seconds = time.perf_counter() - begin
        steps.end(len(outputs), felt.seconds)
        for output in outputs:
            assert isinstance(output, TokenOutput), output
            identity = output.request_id
            if identity in last:
                felt.gaps.append(felt.seconds - last[identity])
            else:
                felt.first.append(felt.seconds - came[identity])
            last[identity] = felt.seconds
            open_ -= output.finish_reason is not None
    return felt


def figures(felt: list[Felt]) -> dict[str, float]:
    """Milliseconds between tokens and to the first one, and tokens a second, of pooled rounds."""
    pooled = Felt(
        [gap for each in felt for gap in each.gaps],
        [first for each in felt for first in each.first],
        seconds=sum(each.seconds for each in felt),
    )
    return {
        **{name: 1e3 * pooled.gap(share) for name, share in SHARES.items()},
        "mean_first": 1e3 * pooled.mean_first,
        "p99_first": 1e3 * sorted(pooled.first)[int(0.99 * (len(pooled.first) - 1))],
        "tokens_per_second": pooled.tokens_per_second,
        "requests": len(pooled.first),
    }


def loads(engine: Engine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each cell before and now, and the ratios of now to before."""
    policy = engine.scheduler.policy
    budget = policy.prompt_budget
    assert budget is not None, "this GPU's steps are not estimated"
    ways: dict[str, PromptBudget | None] = {"before": None, "now": budget}
    rates: dict[tuple[int, int], float] = {}
    steps = Steps(engine)
    for lengths, share in CELLS:
        if lengths not in rates:
            rates[lengths] = serve(Load(SATURATING, *lengths), None).tokens_per_second / lengths[1]
        rate = share * rates[lengths]
        felt: dict[str, list[Felt]] = {way: [] for way in ways}
        for turn in range(options.rounds):
            load = Load(round(rate * options.seconds), *lengths, rate, seed=turn)
            for way in list(ways)[:: 1 if turn % 2 else -1]:
                policy.prompt_budget = ways[way]
                gc.collect()
                felt[way].append(send(engine, load, f"{lengths}-{share}-{turn}-{way}", steps))
        found = {way: figures(each) for way, each in felt.items()}
        ratios = {name: found["now"][name] / found["before"][name] for name in found["now"]}
        yield {"load": lengths, "share": share, "rate": rate, **found, "ratios": ratios}
    policy.prompt_budget = budget
    yield {"steps": steps.beside_estimates()}


class NeverRight:
    """A proposer that always has drafts for its sequence, none of which the model will sample."""

    name, is_spent = "never right", False

    def __init__(self, vocabulary: int) -> None:
        self._draw, self._vocabulary = random.Random(0), vocabulary

    def match(self, tokens: object, end: int) -> int:
        """As of a text that repeats itself."""
        return 16

    def propose(self, most: int) -> list[int]:
        """Ids drawn at random."""
        return [self._draw.randrange(self._vocabulary) for _ in range(most)]


def drafts(engine: Engine, _: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ratios of calls with drafts to those without, by the number of requests."""
    vocabulary, auto = engine.model_config.vocab_size, engine.scheduler.speculator

    def first(_: Sequence) -> NeverRight:
        return NeverRight(vocabulary)

    never = DraftSpeculator(engine.config.drafters, engine.run_ahead, first=first)
    ways = {"off": Speculator(), "auto": auto, "never right": never, "off again": Speculator()}
    for batch, tokens in CALLS.items():
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(1 + ROUNDS):
            gc.collect()
            for way, speculator in ways.items():
                engine.scheduler.speculator = speculator
                prompts = [prompt(PROMPT, vocabulary, f"{batch}-{i}") for i in range(batch)]
                submit(engine, prompts, tokens, f"{batch}-{turn}-{way}", temperature=1.0)
                took, _ = run_all(engine)
                seconds[way].append(took)
        plain = [
            statistics.mean(pair) for pair in zip(seconds["off"], seconds["off again"], strict=True)
        ]
        compared = {
            "auto": (seconds["auto"], plain),
            "never right": (seconds["never right"], plain),
            "control": (seconds["off again"], seconds["off"]),
        }
        ratios = {
            name: [one / other for one, other in zip(*both, strict=True)]
            for name, both in compared.items()
        }
        yield {"batch": batch, "ms": 1e3 * statistics.median(plain[1:]) / tokens} | {
            name: spread(each) for name, each in ratios.items()
        }
    engine.scheduler.speculator = auto


def spread(ratios: list[float]) -> dict[str, float]:
    """The first call's ratio; of the others the median, its upper 95 % by bootstrap, and P90."""
    first, later = ratios[0], sorted(ratios[1:])
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(later, k=len(later))) for _ in range(RESAMPLED))
    return {
        "first": first,
        "median": statistics.median(later),
        "upper": medians[int(0.95 * RESAMPLED)],
        "p90": later[int(0.9 * (len(later) - 1))],
        "worst": later[-1],
    }


PARTS = {"loads": loads, "drafts": drafts}


def rounded(value: Any) -> Any:
    """Four digits tell enough."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, tuple):
        return tuple(rounded(each) for each in value)
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return value


def main(arguments: list[str]) -> int:
    """The parts that are asked for, else both."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_times.engine.tails", allow_abbrev=False
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {sorted(unknown)}: use {', '.join(PARTS)}")
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tpdet-tails-") as name:
        config = EngineConfig.from_values(
            model=str(write_shape(Path(name) / options.shape, options.shape)),
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=8192,
        )
        with closing(Engine(config, SoloWorld())) as engine:
            start = {"start": time.perf_counter() - begin, "tokens": str(engine.runner.step_tokens)}
            print(json.dumps(rounded(start)), flush=True)
            submit(engine, [prompt(8, 1000, "warm")], 8, "warm", temperature=1.0)
            run_all(engine)
            for part in options.parts:
                for row in PARTS[part](engine, options):
                    print(json.dumps(rounded({"part": part} | row)), flush=True)
            print(json.dumps({"seconds": round(time.perf_counter() - begin)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
