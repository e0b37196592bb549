"""Steps that the ranks sample together, by shares of rows or by columns, with the same bits."""

from types import SimpleNamespace

import pytest
import torch

from tests.lib.engine_harness import ask, run
from tests.lib.thread_world import run_threads
from tpdet.comm.exchange.rows import GatherRows, first_rows, row_places, share_of
from tpdet.config import EngineConfig
from tpdet.control.plan import ByShares
from tpdet.errors import IntegrityError
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.runner.step import shared_rows
from tpdet.sampling.sampler import finish, sample, sample_columns, sample_shared

pytestmark = pytest.mark.long

WAYS = (
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "n": 2, "logprobs": 0},
    {"temperature": 1.3, "top_p": 0.6, "min_p": 0.02, "logprobs": 5},
    {"temperature": 0.0},
)
PENALISED = {"temperature": 0.7, "top_k": 30, "frequency_penalty": 0.4}


def requests(*more):
    return [
        ask(f"r{i}", range(7 * i, 7 * i + 3 + 11 * i), seed=2**63 - 1 - i, max_tokens=6 + i, **way)
        for i, way in enumerate((*WAYS, *more))
    ]


@pytest.fixture
def shared(monkeypatch):
    """Numbers of rows of the samples by shares, on rank 0."""
    return counted(monkeypatch, "sample_shared")


@pytest.fixture
def columns(monkeypatch):
    """Numbers of rows of the samples by columns, on any rank."""
    return counted(monkeypatch, "sample_columns")


def counted(monkeypatch, name):
    counts = []
    original = getattr(shared_rows, name)

    def count(logits, params, counts_of, exchange, *rest):
        if rest[:1] in ((), (0,)):
            counts.append(len(params))
        return original(logits, params, counts_of, exchange, *rest)

    monkeypatch.setattr(shared_rows, name, count)
    return counts


def same_answers(found, expected, asked):
    for request in asked:
        for choice in range(request.params.n):
            name = request.request_id
            assert found.answer(name, choice) == expected.answer(name, choice), (name, choice)
            assert repr(found.answer(name, choice)) == repr(expected.answer(name, choice))


@pytest.mark.parametrize(("tp", "preempt_every", "most"), [(2, 0, 64), (4, 3, 64), (2, 3, 2)])
def test_ranks_that_share_the_rows_draw_the_same(tiny_model, shared, tp, preempt_every, most):
    model, asked = tiny_model("qwen3", kv_heads=2), requests()
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 60}
    alone = run(model, asked, **settings)
    assert not shared
    settings |= {"max_num_seqs": most, "share_draws": "on"}
    found = run(
        model, asked, tp=tp, ahead=True, look=False, preempt_every=preempt_every, **settings
    )
    same_answers(found, alone, asked)
    assert shared and max(shared) <= most and (most < 6 or max(shared) == 6)
    assert not preempt_every or found.preemptions


def test_a_step_with_a_row_of_lists_is_rank_0s(tiny_model, shared):
    model, asked = tiny_model("qwen3", kv_heads=2), requests(PENALISED)
    alone = run(model, asked)
    found = run(model, asked, tp=2, ahead=True, look=False, share_draws="on")
    same_answers(found, alone, asked)
    assert all(count < 7 for count in shared)
    only = [ask("p", range(9), seed=5, **PENALISED)]
    shared.clear()
    found = run(model, only, tp=2, ahead=True, look=False, share_draws="on")
    same_answers(found, run(model, only), only)
    assert not shared


PLAIN = (
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 0.0, "top_p": 0.5},  # of which only the likeliest is left
)


def test_rows_without_top_k_and_top_p_are_drawn_by_columns(tiny_model, shared, columns):
    model = tiny_model("qwen3", kv_heads=2)
    asked = [ask(f"p{i}", range(i, i + 5), seed=i, **way) for i, way in enumerate(PLAIN)]
    alone = run(model, asked)
    found = run(model, asked, tp=2, ahead=True, look=False, share_draws="on")
    same_answers(found, alone, asked)
    assert not shared and columns and max(columns) == 3


def test_one_row_with_top_k_or_top_p_has_its_step_drawn_by_shares(tiny_model, shared, columns):
    model, ways = tiny_model("qwen3", kv_heads=2), ({"top_k": 5}, {"top_p": 0.9})
    for way in ways:
        filtered = ask("f", range(4), seed=9, temperature=1.0, max_tokens=3, **way)
        asked = [ask("p", range(9), seed=5, temperature=1.0, max_tokens=8), filtered]
        found = run(model, asked, tp=2, ahead=True, look=False, share_draws="on")
        same_answers(found, run(model, asked), asked)
        # The plain row is sampled on alone, once the other has its three tokens.
        assert shared == [2, 2, 2] and set(columns) == {1} and len(columns) == 2 * 5
        shared.clear()
        columns.clear()


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_without_peer_memory_or_switched_off_rank_0_draws(tiny_model, shared, columns, setting):
    model, asked = tiny_model("qwen3", kv_heads=2), requests()[:3]
    found = run(model, asked, tp=2, ahead=True, look=False, share_draws=setting)
    same_answers(found, run(model, asked), asked)
    assert not shared and not columns


def test_where_there_is_peer_memory_ranks_draw_together():
    class Partition:
        vocabulary_share, mine = 8, (0,)
        world, config = SimpleNamespace(size=2, rank=0), SimpleNamespace(vocab_size=16)

    def opened(setting, memory):
        carrier = SimpleNamespace(memory=memory, world=Partition.world, all_gather=None)
        exchange = SimpleNamespace(carrier=carrier)
        config = EngineConfig(model="m", share_draws=setting, max_num_seqs=4)
        return shared_rows.open_sharing(config, exchange, Partition, 256).open

    found = [opened(s, m) for s in ("auto", "on", "off") for m in (None, "memory")]
    assert found == [False, True, True, True, False, False]


def test_a_plan_that_this_rank_cannot_follow_is_refused():
    partition = SimpleNamespace(
        vocabulary_share=8,
        mine=(0,),
        world=SimpleNamespace(size=2, rank=0),
        config=SimpleNamespace(vocab_size=16),
    )
    exchange = SimpleNamespace(carrier=SimpleNamespace(memory=None, all_gather=None))
    sharing = shared_rows.RowSharing(exchange, partition, 4, open_rows=False)
    with pytest.raises(IntegrityError, match="sample together"):
        sharing.follow(SimpleNamespace(sampling=ByShares(())))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shares_cover_every_row_and_nobody_is_without(ranks):
    for rows in range(1, 40):
        share, firsts = share_of(rows, ranks), first_rows(rows, ranks)
        assert all(0 <= first <= rows - share for first in firsts)
        everyone = [first + i for first in firsts for i in range(share)]
        places = row_places(rows, ranks)
        assert [everyone[place] for place in places] == list(range(rows))


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_draws_together_have_the_bits_of_whole_rows(ranks, rows, processed):
    """Padding columns are poisoned; a row that fails, fails alone and everywhere."""
    vocabulary, width = 997, 320 if ranks == 4 else 512
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocabulary, generator=generator) * 4
    logits[rows - 1, 5] = float("nan")
    params, counts = zip(*[row_of(i) for i in range(rows)], strict=True)
    padded = torch.full((rows, ranks * width), float("nan"))
    padded[:, :vocabulary] = logits

    def one_rank(world):
        mine = padded[:, world.rank * width : (world.rank + 1) * width].contiguous()
        exchange = GatherRows(world, rows)
        shard = Shard(world.rank * width, vocabulary, world.all_gather)
        of = params, counts, exchange, world.rank, ranks, vocabulary, processed
        columns = sample_columns(mine, params, counts, shard, processed)
        return finish(sample_shared(mine, *of)), finish(columns)

    expected = sample(logits, params, counts, processed)
    for shares, columns in run_threads(ranks, one_rank):
        assert repr(shares) == repr(expected)
        assert repr(columns) == repr(expected)


def row_of(index):
    """A row's params, and how many of the likeliest ids it shows."""
    asked = ask("x", (1,), **{**WAYS[index % len(WAYS)], "n": 1}).params
    seed, filters = 2**64 - 1 - index, (asked.top_k, asked.top_p, asked.min_p)
    return RowParams(asked.temperature, seed, 9 + index, index % 3, *filters), asked.logprobs
