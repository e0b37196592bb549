"""Three small models of transformers with random weights, and batches of sequences for them."""

import hashlib

import torch

FAMILIES = ("llama", "gpt2", "qwen3_moe")


def small_model(family, attention="sdpa", **settings):
    """A model of two layers in fp32, in evaluation mode, its weights drawn from a fixed seed."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

    wide = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide |= {"num_key_value_heads": 2, "vocab_size": 256}
    configuration = {
        "llama": lambda: LlamaConfig(**{"intermediate_size": 176} | wide | settings),
        "gpt2": lambda: GPT2Config(
            **{"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256} | settings,
            bos_token_id=0,
            eos_token_id=0,
        ),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **{"intermediate_size": 128, "moe_intermediate_size": 48, "head_dim": 16}
            | wide
            | settings,
            num_experts=8,
            num_experts_per_tok=2,
        ),
    }[family]()
    torch.random.default_generator.manual_seed(7)
    model = AutoModelForCausalLM.from_config(configuration, attn_implementation=attention)
    return model.eval()


def sequences(lengths):
    """Token ids in 1 .. 255 by length."""
    generator = torch.Generator().manual_seed(20_261_126)
    return [torch.randint(1, 256, (length,), generator=generator) for length in lengths]


def padded(rows, side, more=0):
    """Ids and attention mask [B, T], filled up at `side`, with `more` columns of padding."""
    width = max(map(len, rows)) + more
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in "im")
    for index, row in enumerate(rows):
        span = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[index, span], mask[index, span] = row, 1
    return ids, mask


def logits_of(model, rows, side="right", more=0):
    """The logits of the real tokens, by sequence. Without padding the model gets no mask."""
    ids, mask = padded(rows, side, more)
    extra = {}
    if not mask.all():
        extra = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        y = model(ids, use_cache=False, **extra).logits
    return [logits[keep.bool()] for logits, keep in zip(y, mask, strict=True)]


def digest(tensors):
    """SHA-256 (hex) over the bytes of tensors."""
    state = hashlib.sha256()
    for x in tensors:
        state.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
