"""The kernel that writes processed rows, in Triton's interpreter, beside the CPU's path."""

import pytest
import torch

from tests.kernels.interpreted.sampling_rows import WAYS, V, of_each_kind, rows, slow
from tests.lib.kernels.sampling_oracle import masses_by, masses_of, over_shards
from tpdet.kernels.cpu.sampling import launch as cpu_launch
from tpdet.kernels.cuda.sampling import launch
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard


def params(ways):
    return [RowParams(seed=2**63 + way, position=40 + way, **WAYS[way]) for way in ways]


def same_as_the_cpus(x, how):
    """Rows in every bit, fit and tokens, and the masses of the device; what was found."""
    answers, left = launch.sample_processed(x, how, Shard(0, x.shape[1]))
    with masses_by(x.device):
        expected, drawn = cpu_launch.sample_processed(x, how, Shard(0, x.shape[1]))
    fit = expected.answers[0] != 0.0
    chosen = fit & (expected.answers[1] >= 0)
    assert torch.equal(left[chosen].view(torch.int32), drawn[chosen].view(torch.int32))
    assert torch.equal(answers.answers[0], expected.answers[0])
    assert torch.equal(answers.answers[1, fit], expected.answers[1, fit])
    assert torch.equal(answers.answers[2, chosen], expected.answers[2, chosen])
    shares = masses_of(drawn[chosen], drawn[chosen].amax(-1)).sum(-1).double() * 2.0**-40
    assert torch.equal(answers.answers[3, chosen], torch.log(shares))
    return answers, left


@of_each_kind
def test_rows_are_the_cpus(kind):
    ways = (2, 4, 5)
    same_as_the_cpus(rows(kind, len(ways)), params(ways))


@pytest.mark.parametrize("kind", [slow("random"), slow("holes"), slow("huge")])
def test_rows_of_every_way_are_the_cpus(kind):
    ways = range(len(WAYS))
    x, how = rows(kind), params(ways)
    answers, _ = same_as_the_cpus(x, how)
    raw = launch.sample_answers(x, how, Shard(0, V))
    assert torch.equal(answers.answers[:, :2], raw.answers[:, :2])  # greedy, and temperature 1
    # Of huge logits the largest has all the mass, before and after.
    assert torch.equal(answers.answers[3, 2:5], raw.answers[3, 2:5]) == (kind == "huge")


def test_rows_without_an_answer_stay_so():
    x = torch.zeros(3, 40)
    x[0, 7] = torch.nan
    how = [RowParams(0.5, i, 1, forbidden=tuple(range(40)) if i == 1 else ()) for i in range(3)]
    answers, _ = same_as_the_cpus(x, how)
    assert answers.answers[:2, :2].tolist() == [[0.0, 1.0], [0.0, -1.0]]


@pytest.mark.parametrize("ranks", [2, slow(4), slow(8)])
def test_every_cut_of_the_vocabulary_answers_alike(ranks):
    x, how = rows("tied", 2, 1500), params((1, 4))
    how[0] = how[0]._replace(temperature=0.7)
    width = -(-1500 // (16 * ranks)) * 16 + 16
    expected, whole = launch.sample_processed(x, how, Shard(0, 1500))

    def work(piece, shard):
        answers, left = launch.sample_processed(piece, how, shard)
        columns = shard.width(piece.shape[1])
        own = whole[:, shard.first_id : shard.first_id + columns]
        assert torch.equal(left[:, :columns], own)
        return answers.answers

    for found in over_shards(x, ranks, width, work):
        assert torch.equal(found, expected.answers)
