"""Whether a checkpoint has the sizes that its configuration states, from the files' headers alone.

Looked at before anything is made from those sizes: a wrong number in `config.json` would else fill
the memory first, and be found out when the weights are read.
"""

from pathlib import Path

from tpdet.model_config import ModelConfig
from tpdet.weights.checkpoint import open_checkpoint


def check_sizes(directory: Path, config: ModelConfig) -> None:
    """Look at one tensor for each size, in the last layer: with it, all layers are there.

    Raises CheckpointError naming file, tensor and both shapes, or the tensor that is missing, and
    as `open_checkpoint`.
    """
    checkpoint = open_checkpoint(directory)
    for name, shape in _telling(config).items():
        checkpoint.check_shape(name, shape)


def _telling(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors whose shapes hold every size of a configuration."""
    layer = f"model.layers.{config.num_layers - 1}."
    heads, key_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    return {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        f"{layer}self_attn.q_proj.weight": (heads, config.hidden_size),
        f"{layer}self_attn.k_proj.weight": (key_heads, config.hidden_size),
        f"{layer}mlp.gate_proj.weight": (config.intermediate_size, config.hidden_size),
    }
