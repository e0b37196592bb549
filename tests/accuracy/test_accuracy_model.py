"""Logits against Hugging Face transformers on the same weights, and kernels against float64."""

import pytest
import torch
import transformers

from tests.conftest import FAMILIES
from tests.lib.engine_harness import ask, run
from tpdet.kernels import ops, order

pytestmark = pytest.mark.long

SHORT, LONG = 1e-5, 1e-4  # relative error allowed to 64 tokens and at 2,000


def reference(model, ids):
    """transformers' fp32 logits [T, V]."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0]


def error(model, length, **settings):
    """Relative error of the logits at every position of a prompt of `length` tokens."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 1024, (length,), generator=generator).tolist()
    found = run(model, [ask("a", ids, max_tokens=1, prompt_logprobs=0)], **settings)
    ours = torch.stack([found.logits["a", 0, position] for position in range(length)]).double()
    theirs = reference(model, ids).double()
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_short_prompts_agree_with_transformers(tiny_model, family):
    assert error(tiny_model(family, layers=4), 64) <= SHORT


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_long_prompts_agree_with_transformers(tiny_model, family):
    assert error(tiny_model(family, layers=4), 2000) <= LONG


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    ],
    ids=lambda scaling: scaling["rope_type"],
)  # fmt: skip
def test_scaled_rotary_embeddings_agree_with_transformers(tiny_model, scaling):
    model = tiny_model("llama", rope_scaling=scaling)
    assert error(model, 300) <= LONG


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_sliding_windows_agree_with_transformers(tiny_model, family):
    assert error(tiny_model(family, sliding_window=50), 200) <= SHORT


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_head_sizes_agree_with_transformers(tiny_model, head_dim):
    assert error(tiny_model("llama", head_dim=head_dim, heads=4), 64) <= SHORT


def test_bf16_is_no_worse_than_transformers_bf16(tiny_model):
    model = tiny_model("qwen3", layers=4)
    ids = torch.randint(0, 1024, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs = network(torch.tensor([ids])).logits[0].double()
    exact = reference(model, ids).double()
    request = ask("a", ids, max_tokens=1, prompt_logprobs=0)
    found = run(model, [request], dtype="bfloat16")
    ours = torch.stack([found.logits["a", 0, position] for position in range(64)]).double()
    assert (ours - exact).norm() <= (theirs - exact).norm()


@pytest.mark.parametrize("name", order.FOLD_ORDERS)
def test_folded_leaves_are_closer_to_float64_than_one_chain(name):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 12288, generator=generator)
    w = torch.randn(64, 12288, generator=generator)
    exact = x.double() @ w.double().t()
    leaves = w.view(64, 8, -1).permute(1, 0, 2).contiguous()
    plan = order.fold_plan(name, 8, 1)
    sent = ops.fold_roots(ops.leaf_sums(x, leaves, plan.roots[0]), plan.slots)
    folded = ops.fold_final(sent[None], plan.final)
    relative = ((folded.double() - exact).norm() / exact.norm()).item()
    assert relative <= 2e-6


def test_attention_is_close_to_float64():
    from tests.kernels.cpu.test_kernels_cpu import attention_case

    q, pages, batch = attention_case(torch.float32, 64, 8, 2, 500)
    ours = ops.paged_attention(q, *pages, batch)
    keys, values = (
        torch.cat([side[p] for p in batch.sequences[0].pages], 1)[:, :500].double()
        for side in pages
    )
    query = q.double().permute(1, 0, 2)
    keys, values = keys.repeat_interleave(4, 0), values.repeat_interleave(4, 0)
    exact = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
    relative = (ours.double() - exact.permute(1, 0, 2)).norm() / exact.norm()
    assert relative <= 1e-6
