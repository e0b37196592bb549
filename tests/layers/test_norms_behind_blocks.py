"""Norms behind blocks, over all heads: transformers' logits, and one set of bits at every size."""

import pytest
import torch
import transformers

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.engine_harness import ask, run
from tpdet.kernels.cpu.pointwise import norm as cpu_norm
from tpdet.kernels.inputs.norm import Norm, norm_weight

NINE = {"like": "olmo2", "hidden": 192, "heads": 9, "kv_heads": 3, "intermediate": 208}
"""Neighbouring ranks share a key head, and pad their query heads."""


def tokens(count):
    return torch.randint(0, 1024, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def transformers_logits(model, ids, dtype):
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0].double()


def our_logits(model, ids, **settings):
    found = run(model, [ask("a", ids, max_tokens=1, prompt_logprobs=0)], **settings)
    return torch.stack([found.logits["a", 0, i] for i in range(len(ids))]).double()


def test_logits_are_those_of_transformers(tiny_model):
    model, ids = tiny_model(**NINE), tokens(64)
    exact = transformers_logits(model, ids, torch.float32)
    ours = our_logits(model, ids)
    assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max()
    half = our_logits(model, ids, dtype="bfloat16")
    theirs = transformers_logits(model, ids, torch.bfloat16)
    assert (half - exact).norm() <= (theirs - exact).norm()


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ((2,), {"dtype": "bfloat16"}),
        pytest.param((4, 8), {}, marks=pytest.mark.slow),
        pytest.param((2, 4), {"row_layers": "gather", "dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_every_size_gives_the_bits_of_one_rank(tiny_model, sizes, settings):
    model, ids = tiny_model(**NINE), tokens(270)
    probe = ask("long", ids, prompt_logprobs=1, max_tokens=3)
    alone = run(model, [probe], **settings)
    for tp in sizes:
        mixed = [ask("other", range(20)), probe]
        found = run(model, mixed, tp=tp, max_num_batched_tokens=100, **settings)
        for key, logits in alone.logits.items():
            assert_same_bits(found.logits[key], logits, f"TP {tp} {key}")
        assert found.fingerprint == alone.fingerprint


def test_parts_of_a_row_have_the_norm_of_the_whole_row():
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)) * 30
    norm = Norm(torch.linspace(0.5, 2.0, 96), 1e-6)
    cuts = x[:, :32], x[:, 32:]
    largest = torch.stack([cpu_norm.row_largest(part) for part in cuts]).amax(0)
    mass = torch.stack([cpu_norm.row_mass(part, largest) for part in cuts]).sum(0)
    weights = norm.weight[:32], norm.weight[32:]
    found = [
        cpu_norm.norm_by_mass(part, largest, mass, 96, Norm(weight, 1e-6))
        for part, weight in zip(cuts, weights, strict=True)
    ]
    assert_same_bits(torch.cat(found, 1), cpu_norm.rms_norm(x, norm), "parts")
    own = cpu_norm.row_mass(cuts[0], largest)  # negative control: a part's own sum
    wrong = cpu_norm.norm_by_mass(cuts[0], largest, own, 96, Norm(weights[0], 1e-6))
    assert not same_bits(wrong, found[0])


def test_a_factor_of_one_plus_w_is_not_rounded_to_the_model_s_dtype():
    w = torch.tensor([2.0**-9], dtype=torch.bfloat16)
    assert norm_weight("rms_plus_one", w).item() == 1 + 2.0**-9
    assert norm_weight("rms", w) is w
    with pytest.raises(ValueError, match="norm 'batch'"):
        norm_weight("batch", w)
