"""Steps whose rows the ranks share: each draws for some whole rows. Who drew shows in no bit."""

import pytest
import torch

from tests.engine_harness import ask, run
from tpdet.comm.row_exchange import GatherRows, first_rows, row_places, share_of
from tpdet.comm.threads import run_threads
from tpdet.kernels.draw import Draw
from tpdet.runner import shared_rows
from tpdet.sampler import draw_shared, finish, sample
from tpdet.sampling_row import SamplingRow

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
    """Numbers of rows of the draws by shares, on rank 0."""
    counts = []
    original = shared_rows.draw_shared

    def count(logits, draws, counts_of, exchange, rank, ranks, vocab_size):
        if rank == 0:
            counts.append(len(draws))
        return original(logits, draws, counts_of, exchange, rank, ranks, vocab_size)

    monkeypatch.setattr(shared_rows, "draw_shared", count)
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
    settings |= {"max_num_seqs": most, "share_draws": True}
    found = run(
        model, asked, tp=tp, ahead=True, look=False, preempt_every=preempt_every, **settings
    )
    same_answers(found, alone, asked)
    assert shared and max(shared) <= most and (most < 6 or max(shared) == 6)
    assert not preempt_every or found.preemptions


def test_a_step_with_a_row_of_lists_is_rank_0s(tiny_model, shared):
    model, asked = tiny_model("qwen3", kv_heads=2), requests(PENALISED)
    alone = run(model, asked)
    found = run(model, asked, tp=2, ahead=True, look=False, share_draws=True)
    same_answers(found, alone, asked)
    assert all(count < 7 for count in shared)
    only = [ask("p", range(9), seed=5, **PENALISED)]
    shared.clear()
    found = run(model, only, tp=2, ahead=True, look=False, share_draws=True)
    same_answers(found, run(model, only), only)
    assert not shared


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shares_cover_every_row_and_nobody_is_without(ranks):
    for rows in range(1, 40):
        share, firsts = share_of(rows, ranks), first_rows(rows, ranks)
        assert all(0 <= first <= rows - share for first in firsts)
        everyone = [first + i for first in firsts for i in range(share)]
        places = row_places(rows, ranks)
        assert [everyone[place] for place in places] == list(range(rows))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_shared_draws_have_the_bits_of_whole_rows(ranks, rows):
    """Padding columns are poisoned; a row that fails, fails alone and everywhere."""
    vocabulary, width = 997, 320 if ranks == 4 else 512
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocabulary, generator=generator) * 4
    logits[rows - 1, 5] = float("nan")
    inputs = [sampling_row(i) for i in range(rows)]
    padded = torch.full((rows, ranks * width), float("nan"))
    padded[:, :vocabulary] = logits
    draws = [
        Draw(temperature=p.temperature, seed=one.seed, position=one.position, choice=one.choice,
             top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
        for one in inputs for p in [one.params]
    ]  # fmt: skip
    counts = [one.params.logprobs or 0 for one in inputs]

    def one_rank(world):
        mine = padded[:, world.rank * width : (world.rank + 1) * width].contiguous()
        exchange = GatherRows(world, rows)
        return finish(draw_shared(mine, draws, counts, exchange, world.rank, ranks, vocabulary))

    expected = sample(logits, inputs)
    for found in run_threads(ranks, one_rank):
        assert repr(found) == repr(expected)


def sampling_row(index):
    params = ask("x", (1,), **{**WAYS[index % len(WAYS)], "n": 1}).params
    return SamplingRow(
        key=(index, 0), request_id=str(index), params=params, seed=2**64 - 1 - index,
        choice=index % 3, prompt_length=4, token_ids=(), position=9 + index, forbidden_ids=(),
    )  # fmt: skip
