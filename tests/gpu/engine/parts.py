"""Parts of `tests.gpu.engine.bits` that need no model: rotary tables and the sampler."""

import torch

from tests.gpu.lib.checks import same
from tpdet.kernels.cpu.sampling import ranks as cpu_select
from tpdet.kernels.cpu.sampling import tokens as cpu_sampling
from tpdet.kernels.cuda.sampling import launch
from tpdet.kernels.exact.rotary_frequencies import RotarySpec
from tpdet.kernels.exact.rotary_tables import rotary_table
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard

VOCABULARY = 151_936
SPECS = (
    RotarySpec("default", 1000000.0, 128),
    RotarySpec("linear", 10000.0, 64, factor=4.0),
    RotarySpec("llama3", 500000.0, 128, factor=8.0, original_max_position=8192),
    RotarySpec("yarn", 1000000.0, 128, factor=4.0, original_max_position=32768),
)


def check_tables():
    """Tables made on the GPU have the CPU's bits."""
    for spec in SPECS:
        for ours, theirs in zip(
            rotary_table(spec, 40_960, "cuda"), rotary_table(spec, 40_960), strict=True
        ):
            same(ours.cpu(), theirs, spec.kind)


def rows(count, vocabulary=VOCABULARY, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, vocabulary, generator=generator, device="cuda") * 3.0
    x[1::4] = torch.round(x[1::4])  # many ties
    return x


def params(count):
    """Every way of sampling, in turn."""
    ways = (
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.3, "top_p": 0.7, "min_p": 0.001},
        {"temperature": 1.0},
        {"temperature": 0.6, "min_p": 0.2, "repetition_penalty": 1.3, "prompt_ids": (1, 2, 3),
         "output_ids": (5, 5, 7), "frequency_penalty": 0.5, "presence_penalty": 0.1},
        {"temperature": 0.0, "bias": {7: 90.0, 8: 90.0}, "forbidden": (7,)},
        {"temperature": 1.0, "top_p": 1e-6},
    )  # fmt: skip
    return [
        RowParams(seed=i * 0x9E3779B97F4A7C15 % 2**64, position=40 + i, choice=i % 3, **ways[i % 7])
        for i in range(count)
    ]


def sampled(x, how):
    return launch.sample_rows(x, how, Shard(0, x.shape[1]))


def top_of(x):
    return launch.top_of_rows(x, range(len(x)), 20, Shard(0, x.shape[1]))[0]


def check_sampler():
    """A row's token, mass and top ids have the bits it has alone; ids and ties as on the CPU."""
    x, how = rows(35), params(35)
    together = sampled(x, how)
    backwards = sampled(x.flip(0).contiguous(), how[::-1]).tokens.flip(0)
    mass, top = together.log_masses, top_of(x)
    for i, way in enumerate(how):
        alone = sampled(x[i : i + 1], [way])
        assert alone.tokens[0] == together.tokens[i], f"row {i} alone"
        assert backwards[i] == together.tokens[i], f"row {i} in another slot"
        assert alone.log_masses.item() == mass[i].item(), f"mass of row {i} alone"
        assert torch.equal(top[i], top_of(x[i : i + 1])[0]), f"top of row {i} alone"
        assert torch.equal(top[i].cpu(), cpu_select.top_ids(x[i].cpu(), 20)), f"top of row {i}"
    exact = torch.logsumexp(x.double(), -1) - x.amax(-1).double()
    error = (mass - exact).abs().max().item()
    assert error < 3e-6, f"log mass is off by {error:.1e}"
    expected = cpu_sampling.choose_tokens(x.cpu(), dict(enumerate(how)))
    different = [i for i, token in expected.items() if together.tokens[i] != token]
    # exp2 on the GPU rounds otherwise than exp on the CPU: a top-p bound may move by one id.
    assert len(different) <= 2, f"rows {different} choose other tokens than the CPU"
    nothing = RowParams(1.0, 1, 1, forbidden=(0, 1, 2, 3))
    assert sampled(torch.zeros(1, 4, device="cuda"), [nothing]).tokens.tolist() == [-1]
    return f"log mass within {error:.1e}, {len(different)} of 35 tokens differ from the CPU's"
