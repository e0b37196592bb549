"""Models as small as those that tests of other projects use, on the CPU: transformers' answers."""

import pytest
import torch
import transformers

from tests.accuracy.test_accuracy_saved_models import IDS
from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run

LLAMA = {"vocab_size": 1000, "hidden_size": 16, "intermediate_size": 64, "heads": 4, "keys": 4}
SHAPES = {
    "tiny-random-Llama": ("llama", LLAMA, ()),
    "heads of 2": ("qwen2", LLAMA | {"hidden_size": 8, "intermediate_size": 32, "keys": 2,
                                   "vocab_size": 32}, ()),
    "an odd width": ("mistral", LLAMA | {"hidden_size": 32, "intermediate_size": 37, "keys": 2},
                     (2,)),
    "no multiple of 8": ("llama", LLAMA | {"hidden_size": 36, "intermediate_size": 100, "heads": 6,
                                           "keys": 3}, (2,)),
    "heads of 10": ("llama", LLAMA | {"hidden_size": 64, "head_dim": 10, "keys": 2}, (2, 4)),
    "heads of 20": ("qwen3", LLAMA | {"hidden_size": 64, "intermediate_size": 48, "head_dim": 20,
                                      "keys": 2}, (2,)),
    "heads of 80": ("llama", LLAMA | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 80},
                    (2,)),
    "fused": ("phi3", LLAMA | {"hidden_size": 32, "intermediate_size": 37, "keys": 2}, (2,)),
    "without gates": ("starcoder2", LLAMA | {"hidden_size": 32, "intermediate_size": 37, "keys": 2},
                      (2,)),
    "capped": ("gemma2", LLAMA | {"hidden_size": 32, "head_dim": 8, "keys": 2}, (2,)),
    "norms of rows": ("olmo2", LLAMA | {"hidden_size": 32, "intermediate_size": 37}, (2,)),
    "half rotated": ("glm4", LLAMA | {"hidden_size": 32, "head_dim": 8, "keys": 2}, (2,)),
    "experts": ("qwen3_moe", LLAMA | {"hidden_size": 32, "head_dim": 8, "keys": 2, "experts": 8,
                                      "num_experts_per_tok": 2, "moe_intermediate_size": 24}, (2,)),
    "sinks": ("gpt_oss", LLAMA | {"hidden_size": 32, "head_dim": 8, "keys": 2, "experts": 8,
                                  "intermediate_size": 24, "num_experts_per_tok": 2}, (2,)),
    "shared": ("glm4_moe", LLAMA | {"hidden_size": 32, "head_dim": 8, "keys": 2, "experts": 8,
                                    "num_experts_per_tok": 2, "moe_intermediate_size": 24}, (2,)),
}  # fmt: skip
"""transformers' kind, sizes, and sizes of more ranks that fit."""
FIRST = ("tiny-random-Llama", "an odd width", "heads of 10")
NAMES = {"heads": "num_attention_heads", "keys": "num_key_value_heads"}


def made(kind, sizes, folder):
    experts = "n_routed_experts" if kind == "glm4_moe" else "num_experts"
    settings = {NAMES.get(k, experts if k == "experts" else k): v for k, v in sizes.items()}
    settings |= {"num_hidden_layers": 2, "max_position_embeddings": 1024, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **settings, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, tensor in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(tensor, std=0.2)
    model.save_pretrained(folder)
    return model


def logits(folder, ids, **settings):
    found = run(folder, [ask("a", ids, max_tokens=4, prompt_logprobs=0)], **settings)
    return torch.stack([found.logits["a", 0, place] for place in range(len(ids))])


def same_answers(name, folder):
    """transformers' logits, and the same bits at other sizes and in both dtypes."""
    kind, sizes, more_ranks = SHAPES[name]
    model = made(kind, sizes, folder)
    ids = [each % sizes["vocab_size"] for each in IDS]
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].double()
    ours = logits(folder, ids, dtype="float32")
    assert (ours.double() - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    for tp in more_ranks:
        assert_same_bits(logits(folder, ids, dtype="float32", tp=tp), ours)
        narrow = logits(folder, ids, dtype="bfloat16")
        assert_same_bits(logits(folder, ids, dtype="bfloat16", tp=tp), narrow)


@pytest.mark.parametrize("name", FIRST)
def test_a_small_model_has_transformers_logits_at_every_size(tmp_path, name):
    same_answers(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in FIRST])
def test_other_small_models_have_transformers_logits_at_every_size(tmp_path, name):
    same_answers(name, tmp_path)
