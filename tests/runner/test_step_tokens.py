"""The tokens of a step follow the device, the model and the load, and a setting wins."""

from dataclasses import replace

import pytest

from tests.lib.thread_world import run_threads
from tpdet.comm.exchange.peer import OVERLAP_PROGRAMS
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.control.step_seconds import StepSeconds
from tpdet.engine import Engine
from tpdet.kernels.cuda.hardware import H200, NO_GPU
from tpdet.models.micro_batches import first_micro_batch
from tpdet.runner import Runner
from tpdet.runner.graphs.step_graphs import step_rows
from tpdet.runner.start.step_estimate import step_seconds
from tpdet.runner.start.step_tokens import (
    CACHE_SHARE,
    LEAST_TOKENS,
    MOST_TOKENS,
    STEP_SECONDS,
    StepTokens,
    agreed_step_tokens,
    choose_step_tokens,
    whole_tokens,
)
from tpdet.tools.worlds.shapes import cut_for, named_config

MEMORY = 140 << 30


def cut(name, ranks):
    return cut_for(named_config(name), ranks, "tree")


def choose(partition, gpu=H200, memory=MEMORY, **settings):
    config = EngineConfig.from_values(model="m", **settings)
    return choose_step_tokens(config, partition, gpu, memory)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "qwen2.5-14b", "llama-3-70b"])
def test_a_step_in_which_sequences_decode_takes_no_longer_than_is_said(name):
    found = []
    for ranks in (1, 2, 4):
        partition = cut(name, ranks)
        tokens = choose(partition)
        assert LEAST_TOKENS <= tokens.mixed <= tokens.most <= whole_tokens(H200, ranks)
        assert tokens.cache_share <= CACHE_SHARE
        sizes = [rows for rows in step_rows(tokens.most) if rows >= LEAST_TOKENS]
        assert tokens.mixed in sizes, "no graph has these rows: they would be padded"
        if tokens.mixed > sizes[0]:
            assert step_seconds(partition, H200, tokens.mixed) <= STEP_SECONDS
        for longer in (rows for rows in sizes if rows > tokens.mixed):
            assert step_seconds(partition, H200, longer) > STEP_SECONDS
        slow = replace(H200, capability=(8, 0))
        if tokens.mixed < tokens.most:
            assert choose(partition, slow).mixed <= tokens.mixed
        assert choose(partition, memory=MEMORY // 2).most <= tokens.most
        found.append(-step_seconds(partition, H200, MOST_TOKENS))
    assert found == sorted(found), "more GPUs, longer steps"


def test_the_estimate_is_near_the_steps_that_were_timed():
    """Qwen3-8B on H200s, 8,192 rows of prompts of 4,096: 208, 122 and 69 ms at TP 1, 2 and 4."""
    for ranks, measured in ((1, 0.208), (2, 0.122), (4, 0.0693)):
        partition = cut("qwen3-8b", ranks)
        halves = 2 * step_seconds(partition, H200, 4096)
        assert halves == pytest.approx(measured, rel=0.05)


def test_a_setting_wins_and_a_cpu_keeps_its_own():
    partition = cut("qwen3-8b", 1)
    assert choose(partition, max_num_batched_tokens=700) == StepTokens(700, 700)
    assert choose(partition, NO_GPU, 0) == StepTokens(LEAST_TOKENS, LEAST_TOKENS)
    given = choose(partition, NO_GPU, 0, max_num_batched_tokens=16384)
    assert given == StepTokens(16384, 16384)


def test_a_fixed_batch_has_steps_of_one_size():
    partition = cut("qwen3-8b", 1)
    free, fixed = choose(partition), choose(partition, fixed_batch=64)
    assert free.seconds is not None and fixed.seconds is None
    assert free.mixed < free.most and fixed.most == fixed.mixed <= free.mixed


def test_many_sequences_leave_room_for_prompts_and_little_memory_for_few_tokens():
    partition = cut("qwen3-32b", 1)
    for sequences in (256, 1500, 4096):
        assert choose(partition, max_num_seqs=sequences).mixed >= 2 * sequences
    assert choose(partition, memory=64 << 30).most == LEAST_TOKENS
    # Pages that were asked for by number lose nothing.
    assert choose(partition, memory=64 << 30, kv_pages=9).most == whole_tokens(H200, 1)


def test_full_steps_leave_no_multiprocessor_of_one_gpu_without_a_tile():
    """Tiles of 128 rows by 128 or 256 columns, and attention's items of 128 rows, of Qwen3-8B."""
    rows = whole_tokens(H200, 1)
    for width in (6144 // 256, 24576 // 256, 4096 // 128, 32 * 128 // 128):
        assert rows // 128 * width % H200.multiprocessors == 0
    assert choose(cut("qwen3-8b", 1)).most == rows == 8448 and step_rows(rows)[-2:] == [8192, rows]
    for ranks in (4, 8):
        assert choose(cut("qwen3-8b", ranks)).most == MOST_TOKENS == whole_tokens(H200, ranks)
    for changed in ({"multiprocessors": 78}, {"capability": (8, 0)}):
        assert whole_tokens(replace(H200, **changed), 1) == MOST_TOKENS


def test_both_micro_batches_fill_the_multiprocessors_that_an_exchange_leaves():
    """All four products of Qwen3-8B at TP 2 have whole rounds of tiles of 128 x 256."""
    rows, free = whole_tokens(H200, 2), H200.multiprocessors - OVERLAP_PROGRAMS[2]
    assert choose(cut("qwen3-8b", 2)).most == rows == 7168 and rows in step_rows(rows)
    early = first_micro_batch(rows)
    assert early == rows - early
    for width in (6144 // 2 // 256, 24576 // 2 // 256, 4096 // 256):
        assert early // 128 * width % free == 0


def test_only_who_reads_tokens_as_they_come_has_shorter_steps(tiny_model):
    config = EngineConfig.from_values(model=str(tiny_model()), device="cpu", kv_pages=4)
    runner = Runner.start(config, SoloWorld())
    assert runner.step_tokens == StepTokens(LEAST_TOKENS, LEAST_TOKENS)
    seconds = StepSeconds((300, 600), (1.0, 2.0), 0.0, 0.0)
    runner.step_tokens = StepTokens(600, 300, seconds=seconds)
    for changed, streams, expected in (
        ({}, True, (600, 300)),
        ({}, False, (600, 600)),
        ({"max_num_batched_tokens": 90}, True, (90, 90)),
    ):
        engine = Engine(
            config.model_copy(update=changed), SoloWorld(), runner=runner, streams=streams
        )
        policy = engine.scheduler.policy
        assert (policy.max_num_batched_tokens, policy.mixed_step_tokens) == expected
        assert (policy.prompt_budget is None) is (expected != (600, 300))
    runner.close()


def test_the_log_says_what_a_step_takes():
    said = str(choose(cut("qwen3-8b", 1)))
    assert said.startswith("up to 8,448 tokens a step, ")
    assert " while sequences decode, then as few as read prompts at nearly full speed; " in said
    assert "; over 2,048 they take " in said
    assert str(StepTokens(700, 700)) == "up to 700 tokens a step"


def test_ranks_whose_shares_differ_take_the_fewest():
    mine = StepSeconds((4096, 8192), (1.0, 2.0), 0.5, 0.25)
    given = [StepTokens(8192, 4096, 0.01, mine), StepTokens(6144, 5376, 0.02)]
    found = run_threads(2, lambda world: agreed_step_tokens(given[world.rank], world))
    assert found == [StepTokens(6144, 4096, 0.02, mine)] * 2
