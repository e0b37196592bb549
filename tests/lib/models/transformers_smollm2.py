"""SmolLM2 in transformers, with the weights that tpdet reads from its GGUF file."""

import transformers

from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.pieces import part_of


def transformers_smollm2(path):
    """transformers' model with the dequantised weights in fp32."""
    ours = load_model_config(path)
    config = transformers.LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        head_dim=ours.head_dim,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        rms_norm_eps=ours.rms_norm_eps,
        max_position_embeddings=ours.max_position,
        rope_theta=ours.rotary.theta,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    checkpoint = open_checkpoint(path)
    for name, held in model.named_parameters():
        held.data = checkpoint.piece(part_of(name, tuple(held.shape), 0, 0, len(held))).float()
    return model
