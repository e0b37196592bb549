"""The approximate mode on a GPU: attention beside the strict kernel, graphs, and the change.

python -m tests.gpu.engine.approximate [SHAPE]        (qwen3-8b by default, random weights)

Under torchrun each rank has a GPU of its own. Checks that the gathered varlen attention is close to
the strict kernel (and is not with keys moved), that an engine which changes in flight answers and
marks its answers, and prints what the change and a decode step before and after it take.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.lib.engine_harness import ask
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.comm.device import open_world
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.kernels import ops
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.stock import attention as stock_attention
from tpdet.requests.request import TokenOutput

TOKENS = 200


def check_attention():
    """Largest differences of 1e-2 in bf16 values of about 1, with windows, chunks and decodes."""
    draw = torch.Generator("cuda").manual_seed(1)
    shape = (24, 8, 256, 128)
    k, v = (torch.randn(shape, generator=draw, device="cuda").bfloat16() for _ in range(2))
    sequences = (
        PagedSequence(0, 1, 700, (2, 5, 7)), PagedSequence(1, 900, 333, (1, 4, 9, 12, 13)),
        PagedSequence(901, 300, 0, (3, 8)),
    )  # fmt: skip
    q = torch.randn(1201, 32, 128, generator=draw, device="cuda").bfloat16()
    batch = make_batch(sequences, "cuda")
    plan = stock_attention.gather_plan(batch, q.device)
    assert plan is not None and len(plan.rows) == 1200
    for window in (None, 100):
        wanted = ops.paged_attention(q, k, v, batch, window).float()
        found = stock_attention.paged_attention(q, k, v, batch, window, plan).float()
        difference = (found - wanted).abs().max().item()
        moved = dataclasses.replace(plan, places=plan.places.flip(0))
        wrong = stock_attention.paged_attention(q, k, v, batch, window, moved).float()
        control = (wrong - wanted).abs().max().item()
        print(f"attention, window {window}: {difference:.4f}, keys moved {control:.4f}", flush=True)
        assert difference < 0.03 < 0.3 < control


def check_change(folder, shape, world):
    """An engine told in flight that it is slow."""
    config = EngineConfig.from_values(
        model=str(write_shape(folder / shape, shape)),
        load_format="dummy",
        max_model_len=4096,
        max_num_seqs=16,
        on_slowdown="approximate",
    )
    engine = Engine(config, world)
    if world.rank > 0:
        engine.worker_loop()
        engine.close()
        return
    begin = time.perf_counter()
    engine.calibrate()
    print(f"calibrated in {time.perf_counter() - begin:.1f} s: {engine.watch._calibrated}")
    for index in range(16):
        engine.submit(ask(f"r{index}", range(index, 300 + index), max_tokens=TOKENS))
    times, marks, steps = {False: [], True: []}, [], 0
    while engine.has_work:
        steps += 1
        if steps == TOKENS // 2:
            engine.watch.slow = "the test says so"
        begin = time.perf_counter()
        outputs = engine.step()
        times[engine.approximate].append(time.perf_counter() - begin)
        marks += [output.approximate for output in outputs if isinstance(output, TokenOutput)]
    assert len(marks) == 16 * TOKENS and marks == sorted(marks) and len(set(marks)) == 2
    for way, found in times.items():
        name = "approximate" if way else "strict"
        print(f"{name}: {statistics.median(found) * 1e3:.2f} ms a step, longest {max(found):.1f} s")
    engine.stop_workers()
    engine.close()


def main():
    """Run everything; an assertion ends it."""
    shape = sys.argv[1] if len(sys.argv) > 1 else "qwen3-8b"
    world = open_world("cuda", 600.0)
    if world.rank == 0:
        check_attention()
    with tempfile.TemporaryDirectory() as folder:
        check_change(Path(folder), shape, world)


if __name__ == "__main__":
    main()
