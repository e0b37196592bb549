"""How families scale embedded rows, attention, what is added to the stream, and logits."""

import math
import struct
from dataclasses import dataclass

from tpdet.model_config.fields import Fields


@dataclass(frozen=True)
class Scales:
    """fp32 factors of embedded rows, rotated queries and keys, and logits; eps: of a norm's eps."""

    embedding: float = 1.0
    query_key: float = 1.0
    logits: float = 1.0
    eps: float = 1.0


def no_scales(config: Fields, head_dim: int) -> Scales:
    """Every factor is 1."""
    return Scales()


def granite_scales(config: Fields, head_dim: int) -> Scales:
    """Granite's four multipliers.

    The stream is kept divided by `residual_multiplier` m: what is added to it needs no factor then,
    and a norm gives the same rows with eps / m^2. Attention's own factor a replaces 1 / sqrt(D): it
    stands in queries and keys, each times sqrt(a * sqrt(D)).
    """
    residual = config.number("residual_multiplier", 1.0)
    attention = config.number("attention_multiplier", 1.0)
    return Scales(
        embedding=_fp32(config.number("embedding_multiplier", 1.0) / residual),
        query_key=_fp32(math.sqrt(attention * math.sqrt(head_dim))),
        logits=_fp32(1.0 / config.number("logits_scaling", 1.0)),
        eps=1.0 / residual**2,
    )


def _fp32(value: float) -> float:
    (found,) = struct.unpack("<f", struct.pack("<f", value))
    return float(found)
