"""A draft model's later steps as a chain of graphs, and as planned steps without graphs."""

import random

from tests.lib.engine_harness import ask
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.runner import Runner
from tpdet.scheduler.sequence import Sequence
from tpdet.speculative.draft_model.model import DraftModel

WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.02},
)
CALLS = ((1, 5), (3, 12), (17, 9), (40, 6), (40, 15), (2, 21))
"""Sequences, and drafts of the one with most."""


def drafts_of(model, device, **settings):
    """What the model drafts for sequences of every way; how many steps had no plan."""
    config = EngineConfig.from_values(
        model=str(model),
        device=device,
        max_num_seqs=64,
        max_model_len=1024,
        kv_pages=160,
        drafts="off",
        enable_prefix_caching=False,
        **settings,
    )
    runner = Runner.start(config, SoloWorld())
    drafter = DraftModel(runner, runner.model_config.vocab_size)
    draw, found, planned, launch = random.Random(3), [], [], runner.launch
    runner.launch = lambda plan, results: planned.append(plan) or launch(plan, results)
    targets = []
    for i in range(40):
        ids = [draw.randrange(1024) for _ in range(200 + 7 * i % 60)]
        asked = ask(f"r{i}", ids, max_tokens=500, seed=i, **WAYS[i % 4])
        targets.append(Sequence.of(asked, i, 0))
    for count, most in CALLS:
        wanted = [(it, max(1, most - i % 4)) for i, it in enumerate(targets[:count])]
        drafts = drafter.draft(wanted)
        found.append(drafts)
        for (target, _), ids in zip(wanted, drafts, strict=True):
            target.tokens += [*ids, draw.randrange(1024)]
    drafter.close()
    return found, len(planned)


def check_chain(model, device="cuda"):
    """Greedy, sampled and filtered rows, alone and beside each other, over the ends of pages."""
    chained, few = drafts_of(model, device)
    planned, many = drafts_of(model, device, enforce_eager=True)
    assert few < many / 4, f"{few} of {many} steps were planned"
    for call, (left, right) in enumerate(zip(chained, planned, strict=True)):
        for row, (mine, theirs) in enumerate(zip(left, right, strict=True)):
            assert mine == theirs, f"call {call}, sequence {row}: {mine}, planned {theirs}"
    lengths = {len(ids) for call in chained for ids in call}
    assert max(lengths) > 16, "a link's answers have room for fewer steps"
    return {"steps": many, "planned": few}
