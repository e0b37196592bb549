"""The kernels that sample many rows at once, in Triton's interpreter, beside the CPU's path."""

import numpy as np
import pytest
import torch

from tests.kernels.interpreted.sampling_rows import WAYS, V, of_each_kind, params, rows, slow
from tests.lib.kernels.sampling_oracle import (
    answers,
    over_shards,
    prepare,
    reference,
    same_answers,
    tops,
)
from tpdet.kernels.cpu.sampling import tokens as cpu_sampling
from tpdet.kernels.cpu.sampling.noise import gumbel_noise as cpu_noise
from tpdet.kernels.cuda.sampling import launch
from tpdet.kernels.inputs.plain_rows import WORDS, PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard


def whole(x, how):
    return launch.sample_rows(x, how, Shard(0, x.shape[1]))


@of_each_kind
def test_answers_every_way_as_the_cpu_does(kind):
    x, how = rows(kind), params(12)
    same_answers(whole(x, how), reference(x, how), kind)


@of_each_kind
def test_greedy_and_plain_samples_are_the_cpus(kind):
    x = rows(kind, 6, 5003)
    how = [RowParams(t, 2**63 + i, 9, i) for i, t in enumerate((0.0, 1.0, 0.3, 3.0, 1e-4, 1e4))]
    found = whole(x, how).tokens.tolist()
    assert found == [cpu_sampling.choose_token(row, way) for row, way in zip(x, how, strict=True)]


@pytest.mark.parametrize("tried", [range(5), slow(range(5, 12))])
def test_a_row_alone_is_as_in_a_crowd(tried):
    x, how = rows("random"), params(12)
    together = whole(x[: tried.stop], how[: tried.stop])
    for i in tried:
        way = how[i]
        alone = whole(x[i : i + 1], [way])
        assert torch.equal(alone.packed[0], together.packed[i]), i


@pytest.mark.parametrize(
    ("count", "at", "poison"),
    [
        (5, 4444, -torch.nan),
        slow(12, 0, torch.nan),
        slow(12, V - 1, torch.inf),
        slow(12, 4444, -torch.nan),
    ],
)
def test_poisoned_rows_fail_alone(count, at, poison):
    y, how = rows("random", count), params(count)
    y[1::2, at] = poison
    if poison is not torch.inf:
        y[1::2].view(torch.int32)[:, at] |= -(2**31)  # a NaN with its sign set
    y[4] = -torch.inf
    found = whole(y, how)
    same_answers(found, reference(y, how), str(poison))
    assert found.tokens[~found.fit].eq(0).all()


def test_says_when_nothing_is_left():
    x = torch.zeros(4, 6)
    every = tuple(range(6))
    how = [RowParams(t, 1, 1, forbidden=every, top_k=k) for t in (0.0, 1.0) for k in (-1, 3)]
    assert whole(x, how).tokens.tolist() == [-1] * 4


def test_scores_given_tokens():
    x = rows("holes")
    tokens = [i * 701 % V for i in range(12)]
    found = launch.score_tokens(x, tokens, Shard(0, V))
    same_answers(found, answers(*prepare(x), torch.tensor(tokens)), "scores")


@pytest.mark.parametrize(
    ("kind", "first", "count", "ranks", "width"),
    [
        slow("random", 0, 6, 1, 9001),
        slow("random", 0, 6, 2, 4512),
        slow("random", 0, 6, 8, 1136),
        ("tied", 3, 3, 2, 4512),
        slow("tied", 4, 6, 4, 2256),
        slow("holes", 8, 6, 4, 3072),  # the last rank holds padding alone
    ],
)
def test_every_cut_of_the_vocabulary_answers_alike(kind, first, count, ranks, width):
    x, how = rows(kind, count), params(count, first)
    tokens = [i * 701 % V for i in range(count)]

    def work(piece, shard):
        return (
            launch.sample_rows(piece, how, shard).packed,
            launch.score_tokens(piece, tokens, shard).packed,
            *launch.top_of_rows(piece, [0, count - 2], 20, shard),
        )

    expected = work(x, Shard(0, V))
    for found in over_shards(x, ranks, width, work):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["random", "tied", "zeros"])
def test_top_of_rows_is_the_cpus(kind):
    x = rows(kind)
    found, expected = launch.top_of_rows(x, [0, 3], 20, Shard(0, V)), tops(x, [0, 3], 20)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_near_ties_of_rough_scores_are_settled_by_exact_ones():
    """Two ids of one lane whose exact scores differ by one rounding: the better one wins."""
    noise = cpu_noise(torch.arange(4096), seed=3, position=5, choice=0)
    for delta in (0.0, 1e-6, -1e-6):
        x = torch.full((1, 4096), -5.0)
        x[0, 100], x[0, 1124] = 20.0 - noise[100], 20.0 - noise[1124] + delta
        scores = x[0] + noise
        found = int(whole(x, [RowParams(1.0, 3, 5)]).tokens)
        assert found == int(torch.argmax(scores)), delta


@pytest.mark.parametrize("ways", [(1, 0, 3), slow((1, 0, 3, 10)), slow((2, 0, 6, 7)), slow((1, 0))])
def test_written_rows_are_sampled_as_rows_are(ways):
    """From step to step at their next position, beside rows that are pads and stay."""
    x, count = rows("random", len(ways) + 2), len(ways)
    how = [RowParams(seed=2**63 + i, position=2**31 + i, **WAYS[way]) for i, way in enumerate(ways)]
    shard, numbers = Shard(0, V), np.zeros(len(x) * WORDS, np.int64)
    filtered = launch.write_rows(PlainRows.of(how), V, numbers)
    random = [way for way in how if way.temperature]
    assert filtered == any(0 < way.top_k < V or way.top_p < 1.0 for way in random)
    written = torch.from_numpy(numbers)
    for step in range(2):
        moved = [way._replace(position=way.position + step) for way in how]
        found = launch.sample_written(x, written, filtered, shard)
        alone = whole(x[:count], moved).packed
        assert torch.equal(found.packed[:count], alone)
        assert found.tokens[count:].tolist() == x[count:].argmax(-1).tolist()
        launch.move_on(written, torch.tensor([1] * count + [0, 0]))
    assert torch.equal(whole(x[:count], PlainRows.of(moved)).packed, alone)
