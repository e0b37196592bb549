"""Prefill by the number of programs of an overlapped exchange, from a graph of a full step.

    torchrun --nproc-per-node 2 scripts/prefill_overlapped.py qwen3-8b 12,16,20,24
        [--down-on-all]

prints prompt tokens/s, 8 prompts of 4,096 tokens in steps of 8,192, one line a setting, each three
times in turn. With `--down-on-all` every setting runs twice: the second time the down product is
launched as if nothing ran beside it. Dummy weights; bits do not depend on any of it.
"""

import random
import sys
import time
from unittest import mock

import torch

from tpdet.comm.device import open_world
from tpdet.comm.exchange import peer as peer_exchange
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.kernels import ops
from tpdet.layers.mlp import GatedMlp
from tpdet.requests.request import Request, SamplingParams
from tpdet.runner.graphs import decode_graphs, engine_graphs, step_graphs

PROMPT, PROMPTS, TURNS = 4096, 8, 3


def prefill(engine, turn):
    """Tokens/s of PROMPTS prompts, new ones each turn."""
    for index in range(PROMPTS):
        draw = random.Random(turn * PROMPTS + index)
        prompt = tuple(draw.randrange(100_000) for _ in range(PROMPT))
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.submit(Request(request_id=f"{turn}-{index}", prompt_token_ids=prompt, params=params))
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()
    return PROMPTS * PROMPT / (time.perf_counter() - began)


def down_on_all(self, rows, following):
    """`GatedMlp.__call__`, the second product on every multiprocessor."""
    mixed = self._gate_up(rows.x_MH)
    with ops.leaving_multiprocessors(0, mixed.device):
        return self._down(mixed, rows, following)


def capture(engine, count, everywhere):
    """Graphs of one decode row and of a full step, captured with `count` overlapped programs."""
    peer_exchange.OVERLAP_PROGRAMS[engine.world.size] = count
    one_row = decode_graphs.decode_shapes(1, 1)
    call = down_on_all if everywhere else GatedMlp.__call__
    with (
        mock.patch.object(step_graphs, "step_rows", lambda most: [most]),
        mock.patch.object(engine_graphs, "decode_shapes", lambda *_: one_row),
        mock.patch.object(GatedMlp, "__call__", call),
    ):
        torch.cuda.synchronize()
        engine.runner.graphs = None
        engine.runner.capture_graphs()


def main(model, programs, ways):
    """Every number of programs in turn."""
    world = open_world("cuda", 300.0)
    config = EngineConfig.from_values(
        model=model,
        dtype="bfloat16",
        device="cuda",
        load_format="dummy",
        drafts="off",
        max_num_seqs=64,
        max_model_len=PROMPT + 64,
        max_num_batched_tokens=2 * PROMPT,
        kv_pages=400,
        enable_prefix_caching=False,
    )
    engine = Engine(config, world)
    found = {(count, everywhere): [] for count in programs for everywhere in ways}
    for turn in range(TURNS):
        for number, (count, everywhere) in enumerate(found):
            capture(engine, count, everywhere)
            world.barrier()
            if world.rank == 0:
                found[count, everywhere].append(prefill(engine, turn * len(found) + number))
                engine.stop_workers()
            else:
                engine.worker_loop()
            torch.cuda.synchronize()
            world.barrier()
    if world.rank == 0:
        for (count, everywhere), speeds in found.items():
            speeds_text = ", ".join(f"{speed:,.0f}" for speed in speeds)
            print(
                f"{count:3} programs{', down on all' * everywhere}: {speeds_text} tokens/s",
                flush=True,
            )
    engine.close()


if __name__ == "__main__":
    main(
        sys.argv[1],
        [int(part) for part in sys.argv[2].split(",")],
        (False, True) if "--down-on-all" in sys.argv[3:] else (False,),
    )
