"""Head counts and widths that leaves do not divide: one set of bits at every size, and refusals."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.engine_harness import ask, run
from tests.lib.thread_world import run_threads
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.pieces import Pieces
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.errors import UsageError
from tpdet.kernels import order
from tpdet.layers.linear import ColumnPart
from tpdet.tools.worlds.shapes import cut_for

pytestmark = pytest.mark.long

NINE = {"like": "llama", "hidden": 192, "heads": 9, "kv_heads": 3, "intermediate": 208}
FOURTEEN = {"like": "qwen2", "hidden": 128, "heads": 14, "kv_heads": 2, "intermediate": 304}
FIVE = {"like": "qwen3", "hidden": 128, "heads": 5, "kv_heads": 5, "intermediate": 144}
"""As SmolLM2 and Qwen2.5-0.5B are cut; fewer heads than leaves."""

CASES = [
    (NINE, (2, 4), {"dtype": "bfloat16"}),
    (NINE, (2,), {"row_layers": "gather", "dtype": "bfloat16"}),
    (FOURTEEN, (8,), {"fold_order": "pairs"}),
    (FIVE, (4,), {"fold_order": "sequential"}),
]


def probes():
    draw = random.Random(3)
    return [
        ask("long", [draw.randrange(1024) for _ in range(270)], prompt_logprobs=1, max_tokens=3),
        ask("short", [draw.randrange(1024) for _ in range(7)], temperature=0.9, seed=5),
    ]


@pytest.mark.parametrize(("shape", "sizes", "options"), CASES)
def test_every_size_gives_the_bits_of_one_rank(tiny_model, shape, sizes, options):
    model = tiny_model(**shape)
    alone = run(model, probes(), **options)
    crowd = [ask(f"n{i}", range(i, 20 + 9 * i)) for i in range(3)]
    for tp in sizes:
        mixed = [crowd[0], *probes(), *crowd[1:]]
        found = run(model, mixed, tp=tp, max_num_batched_tokens=100, **options)
        for key, logits in alone.logits.items():
            assert_same_bits(found.logits[key], logits, f"TP {tp} {key}")
        assert found.fingerprint == alone.fingerprint


def test_the_probes_tell_cuts_apart(tiny_model):
    """Negative control: other leaves of the same model have other bits and another contract."""
    model = tiny_model(**NINE)
    eight, one = (run(model, probes(), leaves=count) for count in (8, 1))
    assert not all(same_bits(one.logits[key], logits) for key, logits in eight.logits.items())
    assert eight.fingerprint.split("-")[1] != one.fingerprint.split("-")[1]


@settings(deadline=None)  # the first example makes the model
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 3), st.integers(1, 40))
def test_ranks_hold_every_head_once_and_the_keys_they_read(tiny_model, each, keys, power, blocks):
    made = load_model_config(tiny_model(**NINE))
    values = {"num_heads": each * keys, "num_kv_heads": keys, "intermediate_size": 16 * blocks}
    config, ranks = type(made)(**{**vars(made), **values}), 2**power
    if each * keys < ranks or blocks < ranks:
        with pytest.raises(UsageError, match=r"use one of 1"):
            cut_for(config, ranks, "tree")
        return
    parts = [cut_for(config, ranks, "tree", rank=rank) for rank in range(ranks)]
    held = [head for part in parts for head in part.query_heads]
    assert held == list(range(each * keys))
    for part in parts:
        assert {*part.key_heads} == {head // each for head in part.query_heads}
        before, after = part.padded_heads
        padded = before + len(part.query_heads) + after
        group, rest = divmod(padded, len(part.key_heads))
        assert rest == 0
        for place, head in enumerate(part.query_heads):
            assert part.key_heads[(before + place) // group] == head // each
        if each * keys % 8 == 0 and (keys % ranks == 0 or ranks % keys == 0):
            assert part.padded_heads == (0, 0), "sizes that divide pay nothing"
    for cut, whole in (
        (parts[0].cut.attention, each * keys * 64),
        (parts[0].cut.down, 16 * blocks),
    ):
        widths = parts[0].by_rank(cut)
        assert sum(widths) == whole
        assert widths == tuple(len(cut.inputs(part.mine)) for part in parts)


def test_padding_is_zeros_around_what_was_read():
    part = ColumnPart("q", 4, Pieces.whole(), 2, 1)
    read, target = torch.ones(4, 3), torch.full((7, 3), torch.nan)
    part.read_into(target, read)
    assert target.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 4 + [[0.0] * 3]
    column = torch.full((7,), torch.nan)
    part.read_into(column, read[:, 0])
    assert column.tolist() == [0, 0, 1, 1, 1, 1, 0]
    alone = torch.full((4, 3), torch.nan)
    ColumnPart("q", 4, Pieces.whole()).read_into(alone, read)
    assert torch.equal(alone, read)


def test_columns_of_unequal_ranks_are_gathered_in_order():
    whole, widths = torch.randn(5, 24), (3, 7, 6, 8)

    def check(world):
        exchange = GatherExchange(order.fold_plan("tree", 8, 4), world)
        mine = whole.split(widths, dim=1)[world.rank]
        assert_same_bits(exchange.gather_columns(mine, widths), whole)

    run_threads(4, check)


def test_a_size_that_leaves_a_rank_idle_is_refused_with_those_that_fit(tiny_model):
    config = load_model_config(tiny_model(**FIVE))
    for ranks, leaves, sizes in ((8, None, "1, 2, 4"), (16, None, "1, 2, 4"), (3, 16, "1, 2, 4")):
        with pytest.raises(UsageError, match=rf"size {ranks} .* 5 query heads .* one of {sizes}"):
            cut_for(config, ranks, "tree", leaves)
    with pytest.raises(UsageError, match="one of 1, 2, 4, 8, or more --leaves"):
        cut_for(load_model_config(tiny_model(**NINE)), 16, "tree")
