"""Requests that come at random to a server on a virtual clock, and what their readers feel.

Plans are the scheduler's. A step takes the time of Qwen3-8B's products on an H100, as the shape
table has it, and of what lies between them: fitted to decode steps of 5.81, 6.06, 7.1 and 11.5 ms
at batches of 1, 16, 64 and 256, and to 38,400 tokens a second of 16 prompts of 4,096.
"""

import json
import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from tpdet.control.plan import StepPlan
from tpdet.control.row_messages import SampledToken
from tpdet.control.step_seconds import StepSeconds
from tpdet.kernels.cuda.gemm.choice.shape_table import table_path
from tpdet.kernels.cuda.hardware import H100
from tpdet.models.products import head_product, layer_products
from tpdet.requests.request import Request, SamplingParams, TokenOutput
from tpdet.runner.graphs.step_graphs import step_rows
from tpdet.scheduler import Scheduler
from tpdet.tools.worlds.shapes import cut_for, named_config

PARTITION = cut_for(named_config("qwen3-8b"), 1, "tree")
MOST, MIXED = 8192, 5632
"""Tokens of a step, and of one in which sequences decode where nothing cuts prompts finer."""
LAUNCHES, ROW = 0.23e-3, 1.1e-6
"""Seconds beside the products: of a step, and of each of its rows."""
KEY, PAIR = 147_456 / 2.4e12, 4 * 4096 * 36 / 386e12
"""Seconds of a key that a decoding row reads, and of one that a prompt's token reads."""
GRAPHS = step_rows(MOST)
TOKEN = SampledToken(7, 0.0)


@cache
def products(rows: int) -> float:
    """Seconds of all products of a step, by the tuned times of the buckets around `rows`."""
    config, seconds = PARTITION.config, 0.0
    head, layer = head_product(PARTITION).product, layer_products(PARTITION)
    for product, times in ((head, 1), *((each.product, config.num_layers) for each in layer)):
        buckets = _table()[product.kind, product.n, product.k, product.roots]
        known = sorted(buckets)
        most = min(rows, known[-1])
        at = bisect_left(known, most)
        low, high = known[max(at - 1, 0)], known[at]
        share = (most - low) / (high - low) if high > low else 0.0
        seconds += times * 1e-6 * (buckets[low] + share * (buckets[high] - buckets[low]))
    return seconds


@cache
def _table() -> dict[tuple, dict[int, float]]:
    data = json.loads(table_path(H100.name).read_text())
    return {
        (it["kind"], it["n"], it["k"], it.get("roots") or ""): {
            int(bucket): choice["us"] for bucket, choice in it["rows"].items()
        }
        for it in data["products"]
    }


def step_time(plan: StepPlan) -> float:
    """Seconds of a step; one with prompts is padded to a graph's rows."""
    count, start = plan.rows.count, plan.rows.start
    rows = int(count.sum())
    decodes = count == 1
    if not decodes.all():
        rows = GRAPHS[bisect_left(GRAPHS, rows)]
    keys = int((start + 1)[decodes].sum())
    pairs = float((count * (start + count / 2))[~decodes].sum())
    return LAUNCHES + products(rows) + ROW * rows + KEY * keys + PAIR * pairs


@dataclass(frozen=True)
class Load:
    """Requests of about so many prompt and generated tokens, each half as many more or less.

    rate: requests a second, with Poisson arrivals; None: `readers` of them at a time.
    """

    requests: int
    prompt: int
    tokens: int
    rate: float | None = None
    readers: int = 256
    seed: int = 1

    def arrivals(self) -> Iterator[tuple[float, int, int]]:
        """Seconds, prompt tokens and tokens of each request."""
        draw, now = random.Random(self.seed), 0.0
        for _ in range(self.requests):
            now += draw.expovariate(self.rate) if self.rate is not None else 0.0
            lengths = (
                draw.randint(each // 2, 3 * each // 2) for each in (self.prompt, self.tokens)
            )
            yield now, *lengths


@dataclass
class Felt:
    """What readers felt: seconds between tokens and to the first ones; and the whole load's."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)  # decoding and all, of each step
    seconds: float = 0.0

    def gap(self, share: float) -> float:
        """The gap between tokens that this share of all does not exceed."""
        return sorted(self.gaps)[int(share * (len(self.gaps) - 1))]

    @property
    def mean_first(self) -> float:
        """The mean time to the first token."""
        return sum(self.first) / len(self.first)

    @property
    def tokens_per_second(self) -> float:
        """All requests' tokens in a second."""
        return (len(self.gaps) + len(self.first)) / self.seconds


def serve(load: Load, seconds: StepSeconds | None, mixed: int = MIXED) -> Felt:
    """Serve all requests of a load; seconds: by which prompts are cut beside decoding rows."""
    scheduler = Scheduler(
        256, MOST, 1600, 1 << 16, 1 << 15, mixed_step_tokens=mixed, step_seconds=seconds
    )
    felt, came, last = Felt(), {}, {}
    arrivals, open_ = list(load.arrivals())[::-1], 0
    while arrivals or open_:
        while arrivals and (
            open_ < load.readers if load.rate is None else arrivals[-1][0] <= felt.seconds
        ):
            due, prompt, tokens = arrivals.pop()
            name = f"r{len(came)}"
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
            ids = (len(came) + 1, *(1,) * (prompt - 1))
            scheduler.add(Request(request_id=name, prompt_token_ids=ids, params=params))
            came[name] = felt.seconds if load.rate is None else due
            open_ += 1
        if (plan := scheduler.schedule()) is None:
            felt.seconds = arrivals[-1][0]
            continue
        felt.seconds += step_time(plan)
        felt.rows.append((int((plan.rows.count == 1).sum()), int(plan.rows.count.sum())))
        sampled = {(row.admission, row.choice): TOKEN for row in plan.rows if row.samples}
        for output in scheduler.commit(plan.step, sampled):
            assert isinstance(output, TokenOutput)
            name = output.request_id
            if name in last:
                felt.gaps.append(felt.seconds - last[name])
            else:
                felt.first.append(felt.seconds - came[name])
            last[name] = felt.seconds
            open_ -= output.finish_reason is not None
    return felt
