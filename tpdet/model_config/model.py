"""The configuration of one model, as far as it fixes its arithmetic. Needs no torch."""

from dataclasses import dataclass

from tpdet.kernels.exact.rotary_frequencies import RotarySpec

HEAD_SIZES = (64, 96, 128, 256)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: sizes, rotary embedding, windows, dtype of weights and activations.

    `attention_bias` is that of q, k and v; `qk_norm` a norm on each head.
    `windows[i]` is layer i's sliding window: a token sees itself and the `windows[i] - 1` before
    it; None is full attention. `max_position` is the context the checkpoint states.
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rotary: RotarySpec
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
