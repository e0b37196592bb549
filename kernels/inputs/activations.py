"""Activations and soft-caps: names, numbers and constants, the same on every device.

    y = round(act(g) * u),   act(g) = g / (1 + exp(-t))
    silu: t = g        gelu_tanh: t = g * (GELU_LINEAR + (g * g) * GELU_CUBIC)
    clamped (experts of gpt-oss):  y = round((u' + 1) * act(g')),  t = g' * CLAMP_STEEPNESS,
        g' = min(g, CLAMP_LIMIT) and u' = min(max(u, -CLAMP_LIMIT), CLAMP_LIMIT); NaN stays NaN

(1 + tanh z) / 2 is 1 / (1 + exp(-2 z)), so the tanh form of GELU (Hendrycks and Gimpel 2016, arXiv
1606.08415) is SiLU with another exponent.
"""

import math
import struct

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
"""The numbers that kernels are compiled for; 0 is a product without gates."""

GATED_KINDS = {"gated": "silu", "geglu": "gelu_tanh"}
"""The activation of each kind of gated product."""
KIND_OF = {activation: kind for kind, activation in GATED_KINDS.items()}

CLAMPED = "clamped"
CLAMP_LIMIT, CLAMP_STEEPNESS = 7.0, 1.702
EXPERT_ACTIVATIONS = {**ACTIVATIONS, CLAMPED: 3}
"""The same numbers with what joins the gates and ups of experts alone."""

GELU_LINEAR, GELU_CUBIC = 1.5957691669464111, 0.07135481387376785
"""fp32(2 * sqrt(2 / pi)), and fp32 of 0.044715 times that."""

LOG2_E = math.log2(math.e)
SATURATED = 40.0
"""Where (exp(x) - 1) / (exp(x) + 1) is exactly 1 in fp32."""


def activation_number(kind: str) -> int:
    """By the kind of a product; 0 for one that is not gated."""
    activation = GATED_KINDS.get(kind)
    return 0 if activation is None else ACTIVATIONS[activation]


def cap_rate(cap: float, scale: float = 1.0) -> float:
    """fp32(2 * scale / cap): tanh(x / cap) is (E - 1) / (E + 1) with E = exp(2 * x / cap)."""
    (rate,) = struct.unpack("<f", struct.pack("<f", 2.0 * scale / cap))
    return float(rate)
