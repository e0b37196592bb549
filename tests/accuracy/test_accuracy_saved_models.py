"""Small models of every family as transformers saves them today: loaded, they answer as there."""

import pytest
import torch
import transformers

from tests.lib.engine_harness import ask, run
from tpdet.checkpoint.model_config import FAMILIES

IDS = torch.randint(3, 800, (40,), generator=torch.Generator().manual_seed(2)).tolist()
TOKENS = 6
SIZES = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CAPS = {"query_pre_attn_scalar": 100, "sliding_window": 24}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64}
CHANGED = {
    "mistral": {"sliding_window": 24}, "qwen3": {"head_dim": 64}, "phi3": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "ministral3": {"head_dim": 64, "max_position_embeddings": 16384},
    "smollm3": {"no_rope_layer_interval": 2}, "seed_oss": {"head_dim": 64},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
                "attention_multiplier": 0.2, "attention_dropout": 0.1},
    "olmo3": {"sliding_window": 24}, "glm": {"head_dim": 64}, "glm4": {"head_dim": 64},
    "gemma2": CAPS | {"head_dim": 64}, "gemma3_text": CAPS | {"head_dim": 64},
    "starcoder2": {"residual_dropout": 0.1, "sliding_window": 24},
    "qwen3_moe": EXPERTS | {"num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "glm4_moe": EXPERTS | {"n_routed_experts": 8, "num_nextn_predict_layers": 0},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64},
}  # fmt: skip
"""What a small model of a family needs, and settings that are not the class's own."""
MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss")


def made(family, folder, tied, dtype):
    """transformers' model of random weights, in fp32 after it was saved to `folder`."""
    settings = SIZES | CHANGED.get(family, {}) | {"tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, tensor in model.named_parameters():
        spread = 0.05 if tensor.ndim > 1 else 0.2
        torch.nn.init.normal_(
            tensor, 1.0 if "norm" in name and "gemma" not in family else 0, spread
        )
    model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def compared(family, folder, tied, dtype):
    """Ours over theirs: the largest difference of a log-probability, and both greedy answers."""
    model = made(family, folder, tied, dtype)
    request = ask("a", IDS, max_tokens=TOKENS, prompt_logprobs=0)
    found = run(folder, [request], dtype="float32")
    ours = torch.stack([found.logits["a", 0, place] for place in range(len(IDS))]).double()
    answer = []
    with torch.no_grad():
        theirs = model(torch.tensor([IDS])).logits[0].double()
        while len(answer) < TOKENS:
            answer.append(model(torch.tensor([IDS + answer])).logits[0, -1].argmax().item())
    apart = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max().item()
    return apart, found.tokens("a"), answer


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_that_transformers_saved_answers_as_there(tmp_path, family):
    apart, ours, theirs = compared(family, tmp_path, False, "float32")
    assert apart <= 2e-5 and ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [family.name for family in FAMILIES.values()])
def test_a_model_that_transformers_saved_answers_as_there(tmp_path, family, tied, dtype):
    apart, ours, theirs = compared(family, tmp_path, tied, dtype)
    assert apart <= 2e-5 and ours == theirs
