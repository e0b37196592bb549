"""Times of decode steps with drafts: where every row of a step has 1 to 16 positions.

    python -m scripts.gpu_times.engine.draft_steps [steps] [profile] [attention]

`steps`: milliseconds of the GPU for a step and its greedy sampling; `profile`: kernels of some;
`attention`: microseconds of every decode variant, whose bits must be the same. With several ranks
(torchrun) steps and profile are of that tensor-parallel size. `tpdet bench drafts` has tokens a
second, `tpdet bench host` the parts of a step on the host.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.attention.decode import PAGE, PREFILL, draw
from tests.gpu.lib.checks import same
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.comm.device import open_world
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.control.plan import PlanRows, Row
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.attention.variants import AttentionVariant, decode_variant
from tpdet.kernels.cuda.compile.pool import compile_all
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.runner import Runner
from tpdet.sampling.sampler import sample_likeliest

POSITIONS, BATCHES, CONTEXTS = (1, 2, 4, 8, 16), (1, 16, 64), (512, 4096)
PROFILED = ((1, 512, 1), (1, 512, 8), (1, 4096, 8), (16, 4096, 1), (16, 4096, 8), (64, 512, 4))
CASES = ((1, 512, 8), (1, 4096, 4), (1, 4096, 8), (1, 4096, 16), (16, 512, 8), (16, 4096, 8),
         (64, 512, 4), (64, 4096, 4))  # fmt: skip
CACHE, REPEATS = 256 << 20, 20
PROGRAMS = [
    AttentionVariant(rows, 4, stages, fused=fused, swapped=True)
    for rows in (16, 32, 64)
    for stages in (1, 2, 3)
    for fused in (True, False)
]


class Session:
    """The Qwen3-8B shape with random weights, started once."""

    runner: Runner | None = None
    config: EngineConfig
    world: World

    @classmethod
    def start(cls):
        """The runner, started by the first caller."""
        if cls.runner is None:
            begin = time.time()
            folder = Path(tempfile.mkdtemp(prefix="tpdet-drafts-"))
            settings = {"max_model_len": 17 * PAGE, "max_num_seqs": 64, "dtype": "bfloat16"}
            cls.config = EngineConfig.from_values(
                model=str(write_shape(folder / "m", "qwen3-8b")),
                load_format="dummy",
                drafts="off",
                **settings,
            )
            cls.world = open_world(cls.config.device, cls.config.step_timeout)
            cls.runner = Runner.start(cls.config, cls.world)
            say(f"TP {cls.world.size}, start {time.time() - begin:.1f} s")
        return cls.runner


def say(text):
    """Print on rank 0."""
    if Session.runner is None or Session.world.rank == 0:
        print(text, flush=True)


def plan_of(batch, context, positions):
    """Rows with drafts behind `context` computed tokens of each of `batch` sequences."""
    each, rows, chance = -(-(context + positions) // PAGE), [], random.Random(1)
    for i in range(batch):
        ids = tuple(chance.randrange(1000) for _ in range(positions))
        pages = tuple(range(i * each, i * each + each))
        rows.append(Row(i, 0, 0, context, ids, pages, (1,) * each, positions, positions))
    return PlanRows.of(rows)


def run_step(runner, rows):
    """A step's logits from its graph, sampled."""
    logits = runner.graphs.logits(rows)
    shard = Shard(0, logits.shape[1])
    if Session.world.size > 1:
        first, gather = (
            Session.world.rank * logits.shape[1],
            runner.model.exchange.carrier.all_gather,
        )
        shard = Shard(first, runner.model_config.vocab_size, gather)
    sample_likeliest(logits, shard)


def time_step(rows):
    """Milliseconds of the GPU for a step, and seconds of its first, which captures its graph."""
    runner = Session.start()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run_step(runner, rows)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(REPEATS + 2):
        if turn == 2:
            begin.record()
        run_step(runner, rows)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS, first


def steps():
    """Print milliseconds of the GPU by batch, context and positions."""
    Session.start()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for context in CONTEXTS:
        for batch in BATCHES:
            said, plain = [], None
            for positions in POSITIONS:
                if batch * positions > HEAD_ROWS:
                    continue  # a step of this size takes the path of prompts
                took, first = time_step(plan_of(batch, context, positions))
                plain = plain or took
                said.append(f"{positions}: {took:.3f} ({took / plain:.3f}, {first:.2f} s)")
            say(f"steps batch {batch} context {context} ms by positions: " + "; ".join(said))
    say(f"steps took {(free - torch.cuda.mem_get_info()[0]) >> 20} MiB of the GPU")


def profile():
    """Print the kernels of some steps, microseconds of each."""
    runner = Session.start()
    for batch, context, positions in PROFILED:
        rows, count = plan_of(batch, context, positions), 5
        run_step(runner, rows)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(count):
                run_step(runner, rows)
            torch.cuda.synchronize()
        took = Counter()
        for event in found.events():
            if event.device_type.name == "CUDA":
                took[event.name[:44]] += event.time_range.elapsed_us() / count
        most = ", ".join(f"{name} {t:.0f}" for name, t in took.most_common(9))
        say(
            f"profile batch {batch} context {context} positions {positions} us: "
            f"{sum(took.values()):.0f}: {most}"
        )


def attention_case(size, context, positions):
    """q, pages and enough batches that no key is in the cache when it is read."""
    each = -(-(context + positions) // PAGE)
    held = 2 * size * context * 8 * 128 * 2
    copies = min(40, max(2, -(-CACHE // held)))
    pool = [draw(copies * size * each, 8, PAGE, 128, seed=s) for s in (1, 2)]
    order = random.Random(0).sample(range(copies * size * each), copies * size * each)
    batches = []
    for _ in range(copies):
        spans = [tuple(order.pop() for _ in range(each)) for _ in range(size)]
        rows = [PagedSequence(i * positions, positions, context, s) for i, s in enumerate(spans)]
        batches.append(make_batch(tuple(rows), "cuda"))
    return draw(size * positions, 32, 128), pool, batches


def attention_times():
    """Check that all variants agree on a case, then print its times."""
    for case in CASES:
        with recording() as asked:
            launch_attention(*case)
        compile_all(asked.values(), 16)
        for variant, out in zip(PROGRAMS, outs := launch_attention(*case), strict=True):
            same(out, outs[0], f"{case} {variant}")
        say(attention_row(*case))


def launch_attention(size, context, positions):
    """Every variant once, as one row and several; they must have the same bits."""
    q, pool, batches = attention_case(size, context, positions)
    single = attention_case(size, context, 1)[2]
    outs = [attention.attend(q, *pool, batches[0], None, PREFILL, variant) for variant in PROGRAMS]
    attention.paged_attention(q[:size], *pool, single[0], None)
    return outs


def attention_row(size, context, positions):
    """A line of microseconds of one case, quickest variant first."""
    q, pool, batches = attention_case(size, context, positions)
    single = attention_case(size, context, 1)[2]
    one = lambda batch: attention.paged_attention(q[:size], *pool, batch, None)
    (plain,) = interleaved_medians([one], single, 5)
    runs = [lambda b, v=v: attention.attend(q, *pool, b, None, PREFILL, v) for v in PROGRAMS]
    took = interleaved_medians(runs, batches, 5)
    splits = batches[0].splits.shape[0]
    chosen = decode_variant(torch.bfloat16, 128, 4 * positions, splits, size)
    said = []
    for v, t in sorted(zip(PROGRAMS, took, strict=True), key=lambda pair: pair[1]):
        mark = "*" if v == chosen else ""
        said.append(f"{v.rows}r{v.stages}s{'f' if v.fused else 't'} {t:.1f}{mark}")
    return (
        f"attention batch {size} context {context} positions {positions} us: plain {plain:.1f}; "
        + ", ".join(said)
    )


PARTS = {
    "steps": steps,
    "profile": profile,
    "attention": attention_times,
}


def main(arguments: list[str]) -> int:
    """Run the parts that are named, else all."""
    failed = run_parts("engine.draft_steps", PARTS, arguments)
    if Session.runner is not None:
        Session.runner.close()
        Session.world.close()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
