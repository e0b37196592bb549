"""A Qwen3-like decoder in plain torch, whose roundings to the model's dtype can be chosen.

What an implementation rounds, and where, decides how far its log-probabilities lie from the exact
ones; here each rounding is a switch. Shapes: T tokens, H hidden, D head size.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class Rounding:
    """dtype: of the rows that products read; exact: nothing is rounded, products are fp64.

    stream: the residual stream is rounded after each addition; gates: gate and up are rounded
    before the activation reads them.
    """

    dtype: torch.dtype = torch.bfloat16
    stream: bool = False
    gates: bool = False
    exact: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.exact else x.to(self.dtype).to(x.dtype)


EXACT = Rounding(exact=True)
NUMERICS_2 = Rounding(stream=True, gates=True)
"""What the arithmetic contract rounded before its third version."""
NUMERICS_3 = Rounding()


def log_probabilities(model: Path, ids: list[int], rounding: Rounding) -> torch.Tensor:
    """Of ids[1:], each given the ids before it: fp64 [T - 1]; one sequence, no window."""
    config = json.loads((model / "config.json").read_text())
    wide = torch.float64 if rounding.exact else torch.float32
    files = sorted(model.glob("*.safetensors"))
    weights = {name: x.to(wide) for file in files for name, x in load_file(file).items()}
    if not rounding.exact:
        weights = {name: rounding(x) for name, x in weights.items()}
    h = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    for layer in range(config["num_hidden_layers"]):
        h = _layer(h, config, weights, f"model.layers.{layer}", rounding)
    x = rounding(_norm(h, weights["model.norm.weight"], config["rms_norm_eps"]))
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    found = (x[:-1] @ head.t()).double().log_softmax(-1)
    return found.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def _layer(
    h: torch.Tensor, config: dict, weights: dict[str, torch.Tensor], name: str, rounding: Rounding
) -> torch.Tensor:
    eps = config["rms_norm_eps"]
    x = rounding(_norm(h, weights[f"{name}.input_layernorm.weight"], eps))
    mixed = _attention(x, config, weights, f"{name}.self_attn", rounding)
    h = mixed @ weights[f"{name}.self_attn.o_proj.weight"].t() + h
    h = rounding(h) if rounding.stream else h
    x = rounding(_norm(h, weights[f"{name}.post_attention_layernorm.weight"], eps))
    gate, up = (x @ weights[f"{name}.mlp.{part}_proj.weight"].t() for part in ("gate", "up"))
    if rounding.gates:
        gate, up = rounding(gate), rounding(up)
    mixed = rounding(torch.nn.functional.silu(gate) * up)
    h = mixed @ weights[f"{name}.mlp.down_proj.weight"].t() + h
    return rounding(h) if rounding.stream else h


def _attention(
    x: torch.Tensor, config: dict, weights: dict[str, torch.Tensor], name: str, rounding: Rounding
) -> torch.Tensor:
    """x [T, H] -> [T, heads * D], rounded."""
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    count, size = len(x), config["head_dim"]
    q, k, v = (
        rounding(x @ weights[f"{name}.{part}_proj.weight"].t()).view(count, -1, size)
        for part in "qkv"
    )
    if f"{name}.q_norm.weight" in weights:
        q = _norm(q, weights[f"{name}.q_norm.weight"], config["rms_norm_eps"])
        k = _norm(k, weights[f"{name}.k_norm.weight"], config["rms_norm_eps"])
    q, k = (rounding(_rotated(part, config["rope_theta"])) for part in (q, k))
    k, v = (part.repeat_interleave(heads // key_heads, 1) for part in (k, v))
    hidden = torch.full((count, count), -torch.inf, dtype=x.dtype).triu(1)
    score = torch.einsum("thd,shd->hts", q, k) * size**-0.5 + hidden
    weight = rounding((score - score.amax(-1, keepdim=True)).exp())
    mixed = torch.einsum("hts,shd->thd", weight, v) / weight.sum(-1).t()[..., None]
    return rounding(mixed.reshape(count, heads * size))


def _rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [T, heads, D] with rotary embedding at positions 0 to T - 1."""
    size = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, size, 2).double() / size)
    angle = torch.arange(len(x)).double()[:, None] * frequencies
    cos, sin = (f(angle).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(
        x.dtype
    )
