"""The GPU's sampler in Triton's interpreter, beside the CPU's.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted.sampler

prints one JSON line with the result of each case. The interpreter's exp2 and logarithms
are numpy's, so tokens are compared, not the bits of a mass.
"""

import torch

from tests.lib.case_runner import run_cases
from tpdet.kernels.cpu.sampling import count_ahead as cpu_count
from tpdet.kernels.cpu.sampling import log_softmax as cpu_mass
from tpdet.kernels.cpu.sampling import sampling as cpu_sampling
from tpdet.kernels.cpu.sampling import sort_keys as cpu_select
from tpdet.kernels.cpu.sampling.sort_keys import select_prefix
from tpdet.kernels.cuda.sampling import count_ahead, log_softmax, sampling
from tpdet.kernels.cuda.sampling import sort_keys as order_select
from tpdet.kernels.inputs.sampling import Draw

VOCABULARY = 9001  # more than one part, and a part cut short


def rows():
    x = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    x[1] = torch.round(x[1])
    x[2, :100], x[2, 100:300] = -0.0, 0.0
    x[5, ::3] = -torch.inf
    return x


DRAWS = {
    0: Draw(0.9, 2**63 + 12345, 77, 1, top_k=50, top_p=0.9, min_p=0.01),
    1: Draw(1.3, 5, 3, top_k=33),
    2: Draw(
        1.0, 6, 4, top_p=0.5, repetition_penalty=1.3, prompt_ids=(1, 2, 3, 4000),
        output_ids=(5, 5, 8), frequency_penalty=0.4, presence_penalty=0.2,
    ),
    3: Draw(0.0, 6, 4, bias={7: 80.0, 9: 81.0}, forbidden=(9,)),
    4: Draw(0.5, 9, 9, min_p=0.3, bias={3: 9.5}),
    5: Draw(2.0, 2**64 - 1, 2**32 - 1),
}  # fmt: skip


def chooses_the_cpus_tokens_alone_and_together():
    x = rows()
    found = sampling.choose_tokens(x, DRAWS)
    assert found == cpu_sampling.choose_tokens(x, DRAWS), found
    for row, how in DRAWS.items():
        assert sampling.choose_tokens(x[row : row + 1], {0: how}) == {0: found[row]}, row


def finds_the_cpus_bounds():
    """top-k with ties at the bound: exactly the ids the radix select keeps."""
    x = rows()[1:2]
    ids = torch.arange(VOCABULARY)
    for k in (1, 2, 40, 333, VOCABULARY - 1):
        bounds = torch.empty(1, dtype=torch.int64)
        parameters = sampling._parameters([Draw(1.0, 1, 1, top_k=k)], VOCABULARY, x.amax(-1))
        sampling.find_bounds[1,](x, x.amax(-1), parameters, bounds, VOCABULARY, 8, 2048)
        bits = (x[0] + 0.0).view(torch.int32)
        key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
        kept = (key << 22) + (4194303 - ids) >= bounds
        assert torch.equal(kept, select_prefix(x[0], None, k)), k


def draws_by_the_cpus_noise():
    """Of equal logits the largest noise wins: all four words of the counter and the key matter."""
    x = torch.zeros(1, VOCABULARY)
    draws = [
        Draw(1.0, seed, position, choice)
        for seed in (0, 2**32 - 1, 2**32, 2**64 - 3)
        for position in (0, 2**32 - 1)
        for choice in (0, 5)
    ]
    found = sampling.choose_tokens(x.expand(16, -1).contiguous(), dict(enumerate(draws)))
    assert found == {i: cpu_sampling.choose_token(x[0], how) for i, how in enumerate(draws)}
    assert len(dict.fromkeys(found.values())) == 16


def says_when_nothing_is_left():
    x = torch.zeros(1, 4)
    assert sampling.choose_tokens(x, {0: Draw(1.0, 1, 1, forbidden=(0, 1, 2, 3))}) == {0: -1}
    assert sampling.choose_tokens(x, {0: Draw(0.0, 1, 1, forbidden=(0, 1, 3))}) == {0: 2}
    assert sampling.choose_tokens(x, {}) == {}


def finds_the_cpus_top_ids():
    x = rows()
    assert torch.equal(order_select.top_ids(x, 20), cpu_select.top_ids(x, 20))
    assert torch.equal(order_select.top_ids(x[1], 1), cpu_select.top_ids(x[1], 1))
    assert torch.equal(order_select.top_ids(x[0, :5], 9), cpu_select.top_ids(x[0, :5], 9))


def adds_a_mass_that_no_layout_changes():
    x = rows()
    maximum = x.amax(-1)
    mass = log_softmax.log_mass(x, maximum)
    assert (mass - cpu_mass.log_mass(x, maximum)).abs().max() < 1e-6
    assert torch.equal(mass[2:3], log_softmax.log_mass(x[2:3], maximum[2:3]))
    masses = torch.empty(6, 18, dtype=torch.int64)
    log_softmax.add_masses[6, 18](x, maximum, masses, VOCABULARY, x.stride(0), 512, 256)
    assert torch.equal(torch.log(masses.sum(-1).double() * 2.0**-40), mass)


def counts_the_ids_ahead_as_the_cpu_does():
    x = rows()
    at = torch.tensor([0, 3, VOCABULARY - 1, 700, 1, 5])[: len(x)]
    chosen = x.gather(1, at[:, None])[:, 0]
    for width in (VOCABULARY, VOCABULARY - 1, 5, 0):
        found = count_ahead.count_ahead(x, chosen, at, width)
        assert torch.equal(found, cpu_count.count_ahead(x, chosen, at, width)), width


CASES = (
    counts_the_ids_ahead_as_the_cpu_does,
    chooses_the_cpus_tokens_alone_and_together,
    finds_the_cpus_bounds,
    draws_by_the_cpus_noise,
    says_when_nothing_is_left,
    finds_the_cpus_top_ids,
    adds_a_mass_that_no_layout_changes,
)


def main():
    run_cases(CASES)


if __name__ == "__main__":
    main()
