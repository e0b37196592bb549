"""How families scale embedded rows, attention, what is added to the stream, and logits."""

import math
import struct
from dataclasses import dataclass, replace

from tpdet.checkpoint.model_config.fields import Fields


@dataclass(frozen=True)
class Scales:
    """fp32 factors of embedded rows, rotated queries and keys, and logits; eps: of a norm's eps.

    attention_cap, logit_cap: fp32 soft-caps, 0 for none.
    """

    embedding: float = 1.0
    query_key: float = 1.0
    logits: float = 1.0
    eps: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0


def no_scales(config: Fields, head_dim: int, dtype: str) -> Scales:
    """Every factor is 1."""
    return Scales()


def granite_scales(config: Fields, head_dim: int, dtype: str) -> Scales:
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


def gemma_scales(config: Fields, head_dim: int, dtype: str) -> Scales:
    """Embedded rows times sqrt(hidden size), in the model's dtype; `query_pre_attn_scalar` s.

    Attention's factor 1 / sqrt(s) replaces 1 / sqrt(D): it stands in queries and keys, each times
    (D / s)^(1/4).
    """
    scalar = config.number("query_pre_attn_scalar", 256.0)
    return Scales(
        embedding=rounded(math.sqrt(config.integer("hidden_size")), dtype),
        query_key=_fp32(math.sqrt(math.sqrt(head_dim / scalar))),
    )


def gemma2_scales(config: Fields, head_dim: int, dtype: str) -> Scales:
    """`gemma_scales`, and the soft-caps of Gemma 2, which null takes away."""

    def cap(key: str, default: float) -> float:
        return 0.0 if config.has_null(key) else _fp32(config.number(key, default))

    return replace(
        gemma_scales(config, head_dim, dtype),
        attention_cap=cap("attn_logit_softcapping", 50.0),
        logit_cap=cap("final_logit_softcapping", 30.0),
    )


def rounded(value: float, dtype: str) -> float:
    """To a dtype of `DTYPES`, to nearest, ties to even; a value of moderate size above 0."""
    if dtype == "float16":
        (half,) = struct.unpack("<e", struct.pack("<e", value))
        return float(half)
    if dtype == "float32":
        return _fp32(value)
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 256), exponent - 8)


def _fp32(value: float) -> float:
    (found,) = struct.unpack("<f", struct.pack("<f", value))
    return float(found)
