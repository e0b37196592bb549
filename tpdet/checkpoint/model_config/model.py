"""The configuration of one model, as far as it fixes its arithmetic. Needs no torch."""

from dataclasses import dataclass

from tpdet.kernels.exact.rotary_frequencies import RotarySpec
from tpdet.kernels.inputs.experts import Routing

HEAD_SIZES = (64, 96, 128, 256)
"""The sizes that GPU kernels have; the CPU path has every even size up to the largest."""
DTYPES = ("float32", "bfloat16", "float16")

LayerNorms = tuple[str, str, str, str]
NORMS_BEFORE: LayerNorms = ("input_layernorm", "", "post_attention_layernorm", "")
"""One before each block, as in most families."""


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta-net layers in place of attention, where `layers[i]` says so.

    Key head h, of key_size values, serves the value heads [h * r, (h + 1) * r) of value_size, with
    r = value_heads / key_heads. Each channel of queries, keys and values has a convolution before.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def values_of_a_key(self) -> int:
        """Value heads that a key head serves."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True)
class Mixture:
    """Experts in place of the feed-forward blocks of all layers but `dense_layers`.

    width: values between an expert's two products. In the checkpoint the layer's block is called
    `block`; its router is `router` [experts, H], expert i has `experts.i.` and the names of
    `projections`: gate and up [width, H], down [H, width]. biased: whether the router and all
    products of experts have biases; activation: of their gates. choice_bias: the name, below the
    router's, of fp32 values [experts] that are added to scores for the choice; "" for none. shared:
    the name of an expert of `shared_width` that every row takes; "" for none; shared_gate: of the
    weight [1, H] whose sigmoid multiplies it, "" for none. guessing_layers: of the checkpoint,
    behind the last layer; they are not read.
    """

    routing: Routing
    width: int
    block: str
    projections: tuple[str, str, str]
    dense_layers: tuple[int, ...] = ()
    router: str = "gate"
    biased: bool = False
    activation: str = "silu"
    choice_bias: str = ""
    shared: str = ""
    shared_width: int = 0
    shared_gate: str = ""
    guessing_layers: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder with H = hidden_size, I = intermediate_size and D = head_dim.

    Weights by shape: embedding [vocab_size, H]; q [num_heads * D, H]; k, v [num_kv_heads * D, H];
    attention output [H, num_heads * D]; gate and up [I, H]; down [H, I]; output head
    [vocab_size, H], which is the embedding with `tie_word_embeddings`.

    family: a name of `FAMILIES`; architecture: transformers' name of the class.
    rms_norm_eps: of every norm; norm: its kind, of `tpdet.kernels.inputs.norm.KINDS`. layer_norms:
    names of a layer's norms before and after attention, before and after the feed-forward block; ""
    where there is none. attention_bias: whether q, k and v have biases; row_bias: whether the
    attention output and the last product of the feed-forward block have. qk_norm: whether each
    query and key head [D] is normed, or, with qk_norm_over "row", all heads at once. activation: of
    gates, of `tpdet.kernels.inputs.activations`. windows[i]: tokens that a token of layer i sees,
    itself among them; None for all before it. max_position: the checkpoint's context in tokens.
    dtype: one of DTYPES, of weights and activations. eos_token_ids: any of them ends an answer.

    rotary: of layers that rotate their heads; window_rotary: of those among them that have a
    window, None for the same. rotary_layers[i]: whether layer i rotates; () if all do.
    rotary_pairs: "halves", whose pairs are (i, i + R/2) of the first R = rotary.dim values of a
    head, or "neighbours", whose pairs are (2i, 2i + 1). query_key_scale: fp32 factor of rotated
    queries and keys.
    embedding_scale, logit_scale: fp32 factors of embedded rows and of logits. attention_cap,
    logit_cap: soft-caps c * tanh(x / c) of scores and of logits, 0 for none. sinks: whether each
    query head has a logit that stands beside its keys' in the softmax and has no value.
    attention_gate: whether each query head's output is multiplied by the sigmoid of a gate [D].
    linear: layers without attention, None if there are none. mixture: experts, None for a dense
    model. head: what reads the last norm's rows: "tokens" (the output
    head), "labels" (a score head [labels, H]) or "none". pad_token_id: of a score head, the id that
    it does not read at a prompt's end.
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
    qk_norm_over: str = "head"
    activation: str = "silu"
    window_rotary: RotarySpec | None = None
    rotary_layers: tuple[bool, ...] = ()
    rotary_pairs: str = "halves"
    query_key_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    row_bias: bool = False
    sinks: bool = False
    attention_gate: bool = False
    linear: LinearAttention | None = None
    mixture: Mixture | None = None
    head: str = "tokens"
    labels: int = 0
    pad_token_id: int | None = None

    @property
    def experts(self) -> int:
        """Experts of a layer that has any; 0 for a dense model."""
        return 0 if self.mixture is None else self.mixture.routing.experts

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward block is a mixture of experts."""
        return self.mixture is not None and layer not in self.mixture.dense_layers

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has a state in place of keys and values."""
        return self.linear is not None and self.linear.layers[layer]

    @property
    def attention_layers(self) -> int:
        """Layers that have keys and values."""
        return sum(not self.is_linear(i) for i in range(self.num_layers))

    def kind_of(self, layer: int) -> tuple[str, bool, bool]:
        """What sets a layer apart: its window, whether it has experts, whether it is linear."""
        return str(self.windows[layer]), self.has_experts(layer), self.is_linear(layer)

    def rotary_of(self, layer: int) -> RotarySpec | None:
        """How a layer rotates its heads; None if it does not."""
        if self.rotary_layers and not self.rotary_layers[layer]:
            return None
        slides = self.window_rotary is not None and self.windows[layer] is not None
        return self.window_rotary if slides else self.rotary

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer's feed-forward block has no experts."""
        return not all(map(self.has_experts, range(self.num_layers)))

    @property
    def norm_values(self) -> int:
        """Values of a norm of the residual stream: factors and, of a layer norm, biases."""
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    @property
    def rotaries(self) -> tuple[RotarySpec | None, ...]:
        """The different ones of all layers, in the order of their first layers."""
        return tuple(dict.fromkeys(map(self.rotary_of, range(self.num_layers))))


NEUTRAL_VALUES: dict[str, object] = {
    "rotary_layers": (), "rotary_pairs": "halves", "query_key_scale": 1.0, "embedding_scale": 1.0,
    "logit_scale": 1.0, "frequency_factors": (), "norm": "rms", "layer_norms": NORMS_BEFORE,
    "qk_norm_over": "head", "window_rotary": None,
    "activation": "silu", "attention_cap": 0.0, "logit_cap": 0.0,
    "row_bias": False, "sinks": False, "attention_gate": False, "linear": None, "mixture": None,
    "router": "gate", "biased": False,
    "choice_bias": "", "shared": "", "shared_width": 0, "shared_gate": "", "guessing_layers": 0,
    "head": "tokens", "labels": 0, "pad_token_id": None,
}  # fmt: skip
"""Fields that leave everything as it is at these values: digests then leave them out."""
