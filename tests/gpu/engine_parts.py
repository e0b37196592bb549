"""Parts of `tests.gpu.engine` that need no model: rotary tables, the sampler and its times."""

import torch

from tests.gpu.checks import same
from tpdet.kernels.cpu.sampling import sampling as cpu_sampling
from tpdet.kernels.cpu.sampling import sort_keys as cpu_select
from tpdet.kernels.cuda.sampling import log_softmax, sampling
from tpdet.kernels.cuda.sampling import sort_keys as order_select
from tpdet.kernels.exact.rotary_frequencies import RotarySpec
from tpdet.kernels.exact.rotary_tables import rotary_table
from tpdet.kernels.inputs.sampling import Draw

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


def draws(count):
    """Every way of drawing, in turn."""
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
    return {
        i: Draw(seed=i * 0x9E3779B97F4A7C15 % 2**64, position=40 + i, choice=i % 3, **ways[i % 7])
        for i in range(count)
    }


def check_sampler():
    """A row's token, mass and top ids have the bits it has alone; ids and ties as on the CPU."""
    x, how = rows(35), draws(35)
    together = sampling.choose_tokens(x, how)
    backwards = sampling.choose_tokens(x.flip(0).contiguous(), {34 - i: d for i, d in how.items()})
    maximum = x.amax(-1)
    mass, top = log_softmax.log_mass(x, maximum), order_select.top_ids(x, 20)
    for i in how:
        assert sampling.choose_tokens(x[i : i + 1], {0: how[i]})[0] == together[i], f"row {i} alone"
        assert backwards[34 - i] == together[i], f"row {i} in another slot"
        alone = log_softmax.log_mass(x[i : i + 1], maximum[i : i + 1])
        assert alone.item() == mass[i].item(), f"mass of row {i} alone"
        assert torch.equal(top[i], order_select.top_ids(x[i], 20)), f"top of row {i} alone"
        assert torch.equal(top[i].cpu(), cpu_select.top_ids(x[i].cpu(), 20)), f"top of row {i}"
    exact = torch.logsumexp(x.double(), -1) - maximum.double()
    error = (mass - exact).abs().max().item()
    assert error < 3e-6, f"log mass is off by {error:.1e}"
    expected = cpu_sampling.choose_tokens(x.cpu(), how)
    different = [i for i in how if expected[i] != together[i]]
    # exp2 on the GPU rounds otherwise than exp on the CPU: a top-p bound may move by one id.
    assert len(different) <= 2, f"rows {different} choose other tokens than the CPU"
    nothing = sampling.choose_tokens(
        torch.zeros(1, 4, device="cuda"), {0: Draw(1.0, 1, 1, forbidden=(0, 1, 2, 3))}
    )
    assert nothing == {0: -1}
    return f"log mass within {error:.1e}, {len(different)} of 35 tokens differ from the CPU's"


def sampler_times():
    """Milliseconds of the sampler's parts at a vocabulary of 151,936."""
    lines = []
    for count in (1, 16, 64, 256):
        x = rows(count)
        maximum = x.amax(-1)
        full, plain = draws(count), {i: Draw(1.0, i, 5) for i in range(count)}
        cases = {
            "argmax": lambda x=x: torch.argmax(x, -1),
            "log mass": lambda x=x, m=maximum: log_softmax.log_mass(x, m),
            "top 5": lambda x=x: order_select.top_ids(x, 5),
            "plain draw": lambda x=x, d=plain: sampling.choose_tokens(x, d),
            "filtered draw": lambda x=x, d=full: sampling.choose_tokens(x, d),
        }
        for name, function in cases.items():
            lines.append(f"  {name:14s} {count:4d} rows {_milliseconds(function):8.3f} ms")
    print("\n".join(lines))


def _milliseconds(function, repeats=10):
    function()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats
