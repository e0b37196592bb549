"""The configuration of one model, as far as it fixes its arithmetic. Needs no torch."""

from dataclasses import dataclass

from tpdet.kernels.exact.rotary_frequencies import RotarySpec

HEAD_SIZES = (64, 96, 128, 256)
DTYPES = ("float32", "bfloat16", "float16")

LayerNorms = tuple[str, str, str, str]
NORMS_BEFORE: LayerNorms = ("input_layernorm", "", "post_attention_layernorm", "")
"""One before each block, as in most families."""


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder, with H = hidden_size, I = intermediate_size and D = head_dim.

    Weights by shape: embedding [vocab_size, H]; q [num_heads * D, H]; k, v [num_kv_heads * D, H];
    attention output [H, num_heads * D]; gate and up [I, H]; down [H, I]; output head
    [vocab_size, H], which is the embedding with `tie_word_embeddings`.

    family: a key of `tpdet.models.families.LAYERS`; architecture: transformers' name of the class.
    rms_norm_eps: of every norm; norm: its kind, of `tpdet.kernels.inputs.norm.KINDS`. layer_norms:
    names of a layer's norms before and after attention, before and after the feed-forward block; ""
    where there is none. attention_bias: whether q, k and v have biases. qk_norm: whether
    each query and key head [D] is normed. windows[i]: tokens that a token of layer i sees, itself
    among them; None for all before it. max_position: the checkpoint's context in tokens. dtype: one
    of DTYPES, of weights and activations. eos_token_ids: any of them ends an answer.
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
    norm: str = "rms"
    layer_norms: LayerNorms = NORMS_BEFORE


NEUTRAL_VALUES: dict[str, object] = {"norm": "rms", "layer_norms": NORMS_BEFORE}
"""Fields that leave everything as it is at these values: digests then leave them out."""
