"""Processed log-probabilities: of the row that the noise is added to, which filters have cut."""

import pytest
import torch

from tests.lib.thread_world import run_threads
from tpdet.comm.exchange.rows import GatherRows
from tpdet.kernels import ops
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.sampling.sampler import finish, sample, sample_columns, sample_shared

V = 997
PLAIN = {"temperature": 1.0}
WAYS = (
    PLAIN,
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.0, "bias": {5: 3.0}, "forbidden": (7, 8)},
    {"temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.6,
     "frequency_penalty": 0.3, "prompt_ids": (1, 2, 3), "output_ids": (4, 4, 9)},
    {"temperature": 1.1, "allowed": bytes([0b10110100] * (V // 8 + 1)), "top_p": 0.9},
)  # fmt: skip
COUNT = 12


def logits_of(rows, seed=0):
    x = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2
    x[:, ::2] = (x[:, ::2] * 2).round() / 2  # ties
    return x


def row_params(index, **way):
    return RowParams(seed=index * 7919, position=20 + index, choice=index % 3, **way)


def processed(logits, params):
    return sample(logits, params, [COUNT] * len(params), processed=True)


def raw(logits, params):
    return sample(logits, params, [COUNT] * len(params))


EVERY = [row_params(i, **way) for i, way in enumerate(WAYS)]


def test_a_row_alone_shuffled_or_in_a_crowd_has_the_same_bits():
    logits = logits_of(len(WAYS))
    together = processed(logits, EVERY)
    for i, how in enumerate(EVERY):
        assert repr(processed(logits[i : i + 1].clone(), [how])) == repr([together[i]]), WAYS[i]
    order = torch.randperm(len(WAYS), generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = processed(logits[order], [EVERY[i] for i in order])
    assert repr(shuffled) == repr([together[i] for i in order])


def test_tokens_do_not_depend_on_the_mode_and_plain_rows_have_the_raw_bits():
    logits = logits_of(len(WAYS))
    found, ours = processed(logits, EVERY), raw(logits, EVERY)
    assert [each.token_id for each in found] == [each.token_id for each in ours]
    for way, left, right in zip(WAYS, found, ours, strict=True):
        plain = way in (PLAIN, {"temperature": 0.0})
        assert (repr(left) == repr(right)) == plain, way
    # A row of zeros of either sign, alone and beside a row that is changed.
    zeros = torch.where(logits[:2] > 0, 0.0, -0.0)
    left = processed(zeros, [EVERY[0], EVERY[1]])[0]
    assert repr(left) == repr(raw(zeros[:1], EVERY[:1])[0])


@pytest.mark.parametrize(
    ("way", "dropped"),
    [
        ({"temperature": 0.8}, "temperature"),
        ({"temperature": 0.8, "top_k": 12, "top_p": 0.999}, "top_k"),
        ({"temperature": 0.8, "top_k": 12, "top_p": 0.6}, "top_p"),
        ({"temperature": 0.8, "top_k": 12, "min_p": 0.5}, "min_p"),
        ({"temperature": 0.8, "bias": {3: 9.0}}, "bias"),
        ({"temperature": 0.8, "presence_penalty": 0.5, "output_ids": (3,)}, "presence_penalty"),
        ({"temperature": 0.8, "top_k": 12, "forbidden": tuple(range(0, V, 2))}, "forbidden"),
    ],
)
def test_an_operation_that_is_left_out_changes_the_bits(way, dropped):
    logits = logits_of(1)
    left = {name: value for name, value in way.items() if name != dropped}
    found = [
        processed(logits, [row_params(4, **how)])[0] for how in (way, {"temperature": 1.0} | left)
    ]
    tops = [[(c.token_id, c.logprob) for c in answer.top] for answer in found]
    assert tops[0] != tops[1]
    assert raw(logits, [row_params(4, **way)])[0].top != found[0].top


def test_removed_ids_are_absent_and_the_others_sum_to_one():
    logits = logits_of(1)
    for way, most in (({"top_k": 3}, 3), ({"top_k": 3, "forbidden": (0, 1)}, 3)):
        how = row_params(1, temperature=0.9, **way)
        found = processed(logits, [how])[0]
        assert len(found.top) == most
        assert sum(torch.tensor([c.logprob for c in found.top]).exp()) == pytest.approx(1.0)
        assert found.token_id in {c.token_id for c in found.top}
        assert not {c.token_id for c in found.top} & {*how.forbidden}
    only = processed(logits, [row_params(1, temperature=2.0, top_k=1)])[0]
    assert (only.logprob, only.rank, len(only.top)) == (0.0, 1, 1)
    assert repr(only.logprob) == "0.0"


def test_ids_that_a_request_names_are_of_the_processed_row_and_absent_where_removed():
    logits, how = logits_of(1), row_params(1, temperature=0.9, top_k=3)
    known = {c.token_id: c.logprob for c in processed(logits, [how])[0].top}
    removed = next(token for token in range(V) if token not in known)
    named = (removed, *sorted(known))
    found = sample(logits, [how], [named], processed=True)[0]
    assert [(c.token_id, c.logprob) for c in found.top] == sorted(known.items())
    assert [c.token_id for c in sample(logits, [how], [named])[0].top] == [*named]


def test_logits_of_minus_infinity_are_absent_too():
    logits = logits_of(2)
    logits[:, 4:] = -torch.inf
    found = processed(logits, [row_params(1, **PLAIN), row_params(2, temperature=0.5)])
    assert [len(each.top) for each in found] == [4, 4]
    assert len(raw(logits[:1], [row_params(1, **PLAIN)])[0].top) == COUNT


def test_ranks_are_places_in_the_processed_row():
    logits = torch.zeros(1, V)
    logits[0, 30:60] = torch.linspace(1e-3, 2e-3, 30)
    hot = row_params(3, temperature=1e4)  # of equal values the lowest id comes first
    row = ops.sample_processed(logits, [hot], Shard(0, V))[1][0]
    order = torch.sort(row, descending=True, stable=True).indices.tolist()
    found = processed(logits, [hot])[0]
    assert found.rank == 1 + order.index(found.token_id)
    biased = row_params(3, temperature=1.0, bias={77: 50.0})
    assert (processed(logits, [biased])[0].rank, raw(logits, [biased])[0].rank) == (1, 78)


def test_greedy_rows_are_not_divided_and_not_filtered():
    logits = logits_of(1)
    found = processed(logits, [row_params(1, temperature=0.0, top_k=2, top_p=0.1, min_p=0.9)])
    assert repr(found) == repr(raw(logits, [row_params(1, temperature=0.0)]))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_cut_of_the_vocabulary_gives_the_bits_of_whole_rows(ranks):
    rows, width = len(WAYS), -(-V // (16 * ranks)) * 16 + 16
    logits = logits_of(rows)
    logits[3, 5] = torch.nan
    padded = torch.full((rows, ranks * width), torch.nan)
    padded[:, :V] = logits
    # Plain rows alone are shared; those with lists are sampled by columns here, as by one rank.
    shared = [i for i, how in enumerate(EVERY) if not how.changes_logits]

    def one_rank(world):
        own = padded[:, world.rank * width : (world.rank + 1) * width].contiguous()
        shard, exchange = Shard(world.rank * width, V, world.all_gather), GatherRows(world, rows)
        columns = sample_columns(own, EVERY, [COUNT] * rows, shard, processed=True)
        some, counts = [EVERY[i] for i in shared], [COUNT] * len(shared)
        shares = sample_shared(
            own[shared], some, counts, exchange, world.rank, ranks, V, processed=True
        )
        return finish(columns), finish(shares)

    expected = processed(logits, EVERY)
    for columns, shares in run_threads(ranks, one_rank):
        assert repr(columns) == repr(expected)
        assert repr(shares) == repr([expected[i] for i in shared])


def test_rows_that_have_no_answer_say_why():
    logits = logits_of(3)
    logits[0, 9] = torch.nan
    every = tuple(range(V))
    how = [row_params(i, temperature=0.5, forbidden=every if i == 1 else ()) for i in range(3)]
    failed, empty, found = processed(logits, how)
    assert "NaN" in failed.reason and "exclude every token" in empty.reason
    assert repr(found) == repr(processed(logits[2:], how[2:])[0])
