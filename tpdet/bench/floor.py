"""The least time a decode step can take: every weight a rank holds is read once."""

import torch

from tpdet.engine import Engine
from tpdet.model_config import ModelConfig

BYTES_PER_SECOND = {"NVIDIA H200": 4.5e12}
"""Measured read-only bandwidth by GPU; for others no floor is stated."""


def decode_floor_ms(engine: Engine) -> float | None:
    """Weight bytes of a rank over the GPU's bandwidth, in milliseconds; None if it is not known."""
    if engine.runner.device.type != "cuda":
        return None
    rate = BYTES_PER_SECOND.get(torch.cuda.get_device_name())
    if rate is None:
        return None
    return weight_bytes(engine.model_config) / engine.world.size / rate * 1e3


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of the weights that a decode step reads: all but the embedding's unread rows."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * query + 2 * key)
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    count = config.num_layers * (attention + feed_forward) + head
    return count * getattr(torch, config.dtype).itemsize
