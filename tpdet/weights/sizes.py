"""Checks that a checkpoint has the sizes of its configuration, by the headers of its files.

This runs before anything of those sizes is allocated: otherwise a wrong number in `config.json`
would fill the memory before the weights are read and refused.
"""

from pathlib import Path

from tpdet.model_config import ModelConfig
from tpdet.weights.checkpoint import open_checkpoint


def check_sizes(directory: Path, config: ModelConfig) -> None:
    """Check one tensor for each size; those of the last layer show the number of layers too.

    Raises CheckpointError naming the file, the tensor and both shapes, or a missing tensor; and as
    `open_checkpoint`.
    """
    checkpoint = open_checkpoint(directory)
    for name, shape in _sized_tensors(config).items():
        checkpoint.check_shape(name, shape)


def _sized_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors, with their shapes, in which every size of a configuration occurs."""
    layer = f"model.layers.{config.num_layers - 1}."
    heads, key_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    return {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        f"{layer}self_attn.q_proj.weight": (heads, config.hidden_size),
        f"{layer}self_attn.k_proj.weight": (key_heads, config.hidden_size),
        f"{layer}mlp.gate_proj.weight": (config.intermediate_size, config.hidden_size),
    }
