"""What transformers' class of a text part has where `text_config` leaves a key out.

Checkpoints with images were saved as differences from it (LLaVA-1.5 has 6 keys of a Llama). A whole
text model states its keys; one that does not is refused.
"""

from typing import Any

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "eos_token_id",
)  # fmt: skip
_BY_TYPE: dict[str, tuple[int | float | None, ...]] = {
    "llama": (32000, 4096, 11008, 32, 32, None, 2048, 1e-6, 2),
    "mistral": (32000, 4096, 14336, 32, 32, 8, 131072, 1e-6, 2),
    "ministral3": (131072, 4096, 14336, 34, 32, 8, 262144, 1e-5, 2),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, 32768, 1e-6, None),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 32768, 1e-6, None),
    "qwen2_vl_text": (152064, 8192, 29568, 80, 64, 8, 32768, 1e-5, 151645),
    "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64, 8, 32768, 1e-5, 151645),
    "qwen3_vl_text": (151936, 4096, 22016, 32, 32, 32, 128000, 1e-6, None),
    "gemma2": (256000, 2304, 9216, 26, 8, 4, 8192, 1e-6, 1),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 131072, 1e-6, 1),
    "granite": (32000, 4096, 11008, 32, 32, None, 2048, 1e-6, 2),
    "qwen3_5_text": (248320, 4096, 12288, 32, 16, 4, 32768, 1e-6, None),
    "qwen3_5_moe_text": (248320, 2048, None, 40, 16, 2, 32768, 1e-6, None),
    "phi3": (32064, 3072, 8192, 32, 32, None, 4096, 1e-5, 32000),
}
_BASES = {"qwen2_vl_text": 1e6, "qwen2_5_vl_text": 1e6, "qwen3_vl_text": 5e5}
"""The base of the rotary embedding, where it is not the family's own."""
_LINEAR: dict[str, object] = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_EXPERTS: dict[str, object] = {
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8, "num_experts": 256,
}  # fmt: skip
_FURTHER = {"qwen3_5_text": _LINEAR, "qwen3_5_moe_text": _LINEAR | _EXPERTS}
"""Keys of a `model_type` alone."""
_FIRST_WINDOWS = {"qwen2_vl_text": 80, "qwen2_5_vl_text": 80}
"""`max_window_layers`, where it is not the family's own."""


def completed(kind: str, stated: dict[str, Any]) -> dict[str, Any]:
    """What a text part of a `model_type` states, and its class's values of keys that it lacks."""
    usual: dict[str, Any] = dict(zip(_SIZES, _BY_TYPE.get(kind, ()), strict=False))
    usual |= _FURTHER.get(kind, {})
    if kind in _FIRST_WINDOWS:
        usual["max_window_layers"] = _FIRST_WINDOWS[kind]
    rotary = [stated.get(key) for key in ("rope_scaling", "rope_parameters")]
    if kind in _BASES and not any(isinstance(r, dict) and "rope_theta" in r for r in rotary):
        usual["rope_theta"] = _BASES[kind]
    return usual | stated
