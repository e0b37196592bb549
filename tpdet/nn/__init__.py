"""What PyTorch programs take from tpdet: operators, modules and modes for their own models."""

from tpdet.nn.invariant_mode.mode import invariant
from tpdet.nn.load import from_pretrained, load, save
from tpdet.nn.model import CausalLM, Llama, Qwen3, Qwen3Moe

__all__ = [
    "CausalLM", "Llama", "Qwen3", "Qwen3Moe", "from_pretrained", "invariant", "load", "save",
]  # fmt: skip
