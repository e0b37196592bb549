"""Prefill by what an exchange aside takes: its programs and the rows of each at once.

    torchrun --nproc-per-node 4 -m tests.gpu.prefill_aside qwen3-8b 12,16,20,24,28

prints prompt tokens/s, 8 prompts of 4,096 tokens in steps of 8,192, one line a setting: the second
and third turn of all settings, the first compiles. Dummy weights; bits do not depend on any of it.
"""

import random
import sys
import time

import torch

from tpdet.comm import peer_exchange
from tpdet.comm.device import open_world
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.request import Request, SamplingParams

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


def main(model, programs):
    """Every number of programs with one and with two rows at once, in turn."""
    world = open_world("cuda", 300.0)
    config = EngineConfig.from_values(
        model=model, dtype="bfloat16", device="cuda", load_format="dummy", max_num_seqs=64,
        max_model_len=PROMPT + 64, max_num_batched_tokens=2 * PROMPT, kv_pages=400,
        enforce_eager=True, enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine(config, world)
    found = {(count, rows): [] for count in programs for rows in (1, 2)}
    for turn in range(TURNS):
        for number, (count, rows) in enumerate(found):
            peer_exchange.PROGRAMS_ASIDE[world.size] = count
            peer_exchange.ROWS_ASIDE = rows
            if world.rank == 0:
                speed = prefill(engine, turn * len(found) + number)
                if turn:
                    found[count, rows].append(speed)
                engine.stop_workers()
            else:
                engine.worker_loop()
            torch.cuda.synchronize()
            world.barrier()
    if world.rank == 0:
        for (count, rows), speeds in found.items():
            told = ", ".join(f"{speed:,.0f}" for speed in speeds)
            print(f"{count:3} programs of {rows} rows at once: {told} tokens/s", flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], [int(part) for part in sys.argv[2].split(",")])
