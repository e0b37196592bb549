"""The GPU's sampler in Triton's interpreter, beside the CPU's.

The interpreter's exp2 and logarithms are numpy's, so tokens are compared, not the bits of a mass.
"""

import torch

from tests.lib.pairwise import pairwise
from tpdet.kernels.cpu.sampling import noise as cpu_mass
from tpdet.kernels.cpu.sampling import ranks as cpu_select
from tpdet.kernels.cpu.sampling import tokens as cpu_sampling
from tpdet.kernels.cuda.sampling import launch, ranks
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard

VOCABULARY = 9001  # more than one part, and a part cut short


def rows():
    x = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    x[1] = torch.round(x[1])
    x[2, :100], x[2, 100:300] = -0.0, 0.0
    x[5, ::3] = -torch.inf
    return x


def test_samples_by_the_cpus_noise():
    """Of equal logits the largest noise wins: all four words of the counter and the key matter."""
    seeds, positions, choices = (0, 2**32 - 1, 2**32, 2**64 - 3), (0, 2**32 - 1), (0, 5)
    params = [RowParams(1.0, *words) for words in pairwise(seeds, positions, choices)]
    x = torch.zeros(len(params), VOCABULARY)
    found = launch.sample_rows(x, params, Shard(0, VOCABULARY)).tokens.tolist()
    assert found == [cpu_sampling.choose_token(x[0], how) for how in params]
    assert len(set(found)) == len(params) == 8


def test_finds_the_cpus_top_ids():
    x = rows()
    for part, count in ((x, 20), (x[1:2], 1), (x[:1, :5], 5)):
        found = ranks.ids_of_keys(ranks.top_keys(part, count))
        assert torch.equal(found, cpu_select.top_ids(part, count))


def test_adds_a_mass_that_no_neighbour_changes():
    x, how = rows(), RowParams(1.0, 1, 1)
    mass = launch.sample_rows(x, [how] * len(x), Shard(0, VOCABULARY)).log_masses
    assert (mass - cpu_mass.log_mass(x, x.amax(-1))).abs().max() < 1e-6
    alone = launch.sample_rows(x[2:3], [how], Shard(0, VOCABULARY)).log_masses
    assert torch.equal(mass[2:3], alone)


def test_counts_the_ids_ahead_as_the_cpu_does():
    x = rows()
    at = torch.tensor([0, 3, VOCABULARY - 1, 700, 1, 5])[: len(x)]
    chosen = x.gather(1, at[:, None])[:, 0]
    for width in (VOCABULARY, VOCABULARY - 1, 5, 0):
        found = ranks.count_ahead(x, chosen, at, width)
        assert torch.equal(found, cpu_select.count_ahead(x, chosen, at, width)), width
