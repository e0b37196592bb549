"""The families of models, one entry each: names, keys of `config.json`, and parts of a layer.

All have one decoder layer (`tpdet/models/layer.py`), of which their fields decide.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tpdet.checkpoint.model_config import mixtures
from tpdet.checkpoint.model_config.fields import Fields
from tpdet.checkpoint.model_config.keys import Allowed
from tpdet.checkpoint.model_config.linear_layers import (
    LINEAR_KEYS,
    no_linear,
    no_window,
    qwen_linear,
)
from tpdet.checkpoint.model_config.model import NORMS_BEFORE, LayerNorms, LinearAttention, Mixture
from tpdet.checkpoint.model_config.rope import Base, RotaryRules
from tpdet.checkpoint.model_config.scales import (
    Scales,
    gemma2_scales,
    gemma_scales,
    granite_scales,
    no_scales,
)
from tpdet.checkpoint.model_config.windows import (
    by_pattern,
    every_layer,
    every_other,
    every_other_stated,
    if_stated,
    no_layer,
    rotary_layers,
    switched_by_layer,
    three_of_four,
    where_not_rotated,
)
from tpdet.kernels.inputs.activations import CLAMP_LIMIT, CLAMP_STEEPNESS

_BY_LAYER = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})

_WINDOW = frozenset({"sliding_window"})

_GLM_KEYS = frozenset({"attention_bias", "partial_rotary_factor"})

_ONLY_GELU = (("gelu_pytorch_tanh",), "only gelu_pytorch_tanh is supported")
_GELU = {"hidden_act": _ONLY_GELU, "hidden_activation": _ONLY_GELU}
_GEMMA_KEYS = _WINDOW | frozenset({"query_pre_attn_scalar"})
_NO_CAP = ((), "Gemma 3 has no soft-cap")
_ONLY_BEFORE = ((False,), "tokens see those before them alone")

_ONE_GROUP = ((1,), "only one group of experts to choose from is supported")
_QWEN_EXPERTS = frozenset({"num_experts", "num_experts_per_tok", "moe_intermediate_size"})
_MIXTRAL_EXPERTS = frozenset({"num_local_experts", "num_experts_per_tok"})
_GLM_EXPERTS = frozenset(
    "n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts "
    "first_k_dense_replace".split()
)

_NORMS_AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")

_NORMS_OF_GEMMA = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)

_NORMS_AROUND = (
    *("input_layernorm", "post_self_attn_layernorm"),
    *("post_attention_layernorm", "post_mlp_layernorm"),
)


@dataclass(frozen=True)
class Family:
    """How a family differs from the others. The defaults are those of transformers."""

    architecture: str
    name: str
    """The `model_type` that goes with the architecture."""
    parsed: frozenset[str] = frozenset()
    """Keys of its `config.json` beside `keys.PARSED`."""
    needed: frozenset[str] = frozenset()
    """Those of them that a checkpoint must state, beside `keys.NEEDED`."""
    neutral: Mapping[str, Allowed] = field(default_factory=dict)
    """Keys beside, or in place of, `keys.NEUTRAL`."""
    windows: Callable[[Fields, int], tuple[int | None, ...]] = no_layer
    """(configuration, layers) -> the sliding window of each layer."""
    head_dim: int | None = None
    """Where the key is absent; None: the hidden size over the query heads."""
    key_heads_required: bool = True
    """Else there are as many as query heads where the key is absent."""
    attention_bias: bool = False
    """Whether q, k and v have biases; with the key among `parsed`, only its default."""
    qk_norm: bool = False
    eps_key: str = "rms_norm_eps"
    """The key of what norms add to a mean of squares."""
    row_bias: bool = False
    sinks: bool = False
    attention_gate: bool = False
    gated: bool = True
    """Whether the feed-forward block has gates; else its tensors are c_fc and c_proj."""
    norm: str = "rms"
    layer_norms: LayerNorms = NORMS_BEFORE
    qk_norm_over: str = "head"
    """As the fields of `ModelConfig`."""
    tied: bool = False
    """Whether the output head is the embedding where the key is absent."""
    rotary: RotaryRules = field(default_factory=RotaryRules)
    rotary_layers: Callable[[Fields, int], tuple[bool, ...]] = lambda config, layers: ()
    """(configuration, layers) -> whether each layer rotates its heads; () if all do."""
    rotary_pairs: str = "halves"
    """As `ModelConfig.rotary_pairs`."""
    dtype: str = ""
    """The dtype of checkpoints that name none."""
    scales: Callable[[Fields, int, str], Scales] = no_scales
    """(configuration, head size, dtype) -> its factors."""
    activation: str = "silu"
    """As `ModelConfig.activation`."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that other families must state, where published checkpoints leave them out."""
    mixture: Callable[[Fields, int], Mixture | None] = mixtures.no_experts
    """(configuration, layers) -> its experts."""
    linear: Callable[[Fields, int], LinearAttention | None] = no_linear
    """(configuration, layers) -> its layers without attention."""
    unread: tuple[str, ...] = ()
    """Beginnings of the names of tensors that guess further tokens: they are not read."""
    fused: tuple[str, ...] = ()
    """Which fused tensors its checkpoints have, by the names in `stored_form.py`."""
    stacked: bool = False
    """Whether all experts of a layer are one tensor in the checkpoint, gates and ups in turn."""


_OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    key_heads_required=False,
    qk_norm=True,
    layer_norms=_NORMS_AFTER,
    qk_norm_over="row",
)
_GLM = Family(
    "GlmForCausalLM",
    "glm",
    parsed=_GLM_KEYS,
    head_dim=128,
    attention_bias=True,
    rotary_pairs="neighbours",
    rotary=RotaryRules(partial=0.5),
    fused=("gate_up",),
)
_GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    parsed=_GEMMA_KEYS
    | {"attn_logit_softcapping", "final_logit_softcapping", "sliding_window_size"},
    neutral=_GELU | {"use_bidirectional_attention": _ONLY_BEFORE},
    windows=every_other,
    head_dim=256,
    norm="rms_plus_one",
    layer_norms=_NORMS_OF_GEMMA,
    tied=True,
    scales=gemma2_scales,
    activation="gelu_tanh",
)

_HYBRID_KEYS = LINEAR_KEYS | frozenset({"full_attention_interval", "partial_rotary_factor"})
_GUESSING = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
_SHARED_EXPERT = _QWEN_EXPERTS | {"shared_expert_intermediate_size"}
_HYBRID = Family(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    parsed=_HYBRID_KEYS | _GUESSING,
    needed=LINEAR_KEYS,
    neutral={
        "attn_output_gate": ((True,), "attention without a gate is not supported"),
        "output_gate_type": (("swish",), "only swish is supported"),
        "mamba_ssm_dtype": (("float32",), "states are fp32 alone: remove it"),
        "mlp_only_layers": (([],), "dense layers among those with experts are not supported"),
    },
    windows=no_window,
    head_dim=256,
    attention_gate=True,
    qk_norm=True,
    norm="rms_plus_one",
    rotary=RotaryRules(partial=0.25, settings=frozenset({"mrope_section", "mrope_interleaved"})),
    linear=qwen_linear,
    unread=("mtp.",),
    fused=("gated_q", "linear_qkv", "linear_convolution"),
)

FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            "llama",
            neutral={"sliding_window": ((), "Llama has no sliding window")},
            key_heads_required=False,
        ),
        Family("MistralForCausalLM", "mistral", parsed=_WINDOW, windows=every_layer),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            parsed=_BY_LAYER,
            neutral={"attention_bias": ((True,), "Qwen2 always has biases on q, k and v")},
            windows=switched_by_layer,
            attention_bias=True,
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            parsed=_BY_LAYER,
            windows=switched_by_layer,
            head_dim=128,
            qk_norm=True,
        ),
        Family(
            "Ministral3ForCausalLM",
            "ministral3",
            parsed=_WINDOW,
            windows=if_stated,
            head_dim=128,
            rotary=RotaryRules(
                settings=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
                scaling_stated=True,
            ),
        ),
        Family(
            "SmolLM3ForCausalLM",
            "smollm3",
            parsed=_BY_LAYER | {"no_rope_layers", "no_rope_layer_interval"},
            windows=where_not_rotated,
            tied=True,
            rotary=RotaryRules(theta=2000000.0),
            rotary_layers=rotary_layers,
        ),
        Family(
            "GraniteForCausalLM",
            "granite",
            parsed=frozenset(
                "embedding_multiplier residual_multiplier attention_multiplier "
                "logits_scaling".split()
            ),
            key_heads_required=False,
            scales=granite_scales,
        ),
        Family(
            "SeedOssForCausalLM",
            "seed_oss",
            parsed=frozenset({"attention_bias"}),
            neutral={"attention_out_bias": ((False,), "a bias of this product is not supported")},
            head_dim=128,
            attention_bias=True,
        ),
        Family(
            "Phi3ForCausalLM",
            "phi3",
            parsed=frozenset({"sliding_window", "partial_rotary_factor"}),
            neutral={
                "lm_head_bias": ((False,), "a checkpoint with this bias is not supported"),
                "full_attn_mod": ((1,), "only 1 is supported"),
                "interpolate_factor": ((1,), "only 1 is supported"),
            },
            windows=if_stated,
            key_heads_required=False,
            rotary=RotaryRules(partial=1.0),
            fused=("qkv", "gate_up"),
        ),
        _OLMO2,
        replace(
            _OLMO2,
            architecture="Olmo3ForCausalLM",
            name="olmo3",
            parsed=_WINDOW,
            windows=three_of_four,
            rotary=RotaryRules(500000.0, window=Base("rope_theta", 500000.0)),
        ),
        _GLM,
        replace(_GLM, architecture="Glm4ForCausalLM", name="glm4", layer_norms=_NORMS_AROUND),
        _GEMMA2,
        replace(
            _GEMMA2,
            architecture="Gemma3ForCausalLM",
            name="gemma3_text",
            parsed=_GEMMA_KEYS
            | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
            neutral=_GELU
            | {
                "attn_logit_softcapping": _NO_CAP,
                "final_logit_softcapping": _NO_CAP,
                "use_bidirectional_attention": _ONLY_BEFORE,
            },
            windows=by_pattern,
            qk_norm=True,
            rotary=RotaryRules(
                1000000.0, window=Base("rope_local_base_freq", 10000.0), context_stated=True
            ),
            scales=gemma_scales,
            defaults={
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
            },
        ),
        Family(
            "Starcoder2ForCausalLM",
            "starcoder2",
            parsed=frozenset({"norm_epsilon", "sliding_window"}),
            neutral={
                "hidden_act": _ONLY_GELU,
                "use_bias": ((True,), "a checkpoint without biases is not supported"),
                "mlp_type": (("default",), "only default is supported"),
                "norm_type": (("layer_norm",), "only layer_norm is supported"),
            },
            windows=if_stated,
            attention_bias=True,
            row_bias=True,
            gated=False,
            eps_key="norm_epsilon",
            norm="layer",
            tied=True,
            activation="gelu_tanh",
        ),
        Family(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            parsed=_BY_LAYER
            | _QWEN_EXPERTS
            | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"},
            needed=_QWEN_EXPERTS,
            windows=switched_by_layer,
            qk_norm=True,
            mixture=mixtures.qwen_experts,
        ),
        Family(
            "MixtralForCausalLM",
            "mixtral",
            parsed=_MIXTRAL_EXPERTS | _WINDOW,
            needed=_MIXTRAL_EXPERTS,
            windows=if_stated,
            rotary=RotaryRules(theta=1000000.0),
            mixture=mixtures.mixtral_experts,
        ),
        Family(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            parsed=_GLM_KEYS
            | _GLM_EXPERTS
            | {"use_qk_norm", "routed_scaling_factor", "num_nextn_predict_layers"},
            needed=_GLM_EXPERTS,
            neutral={
                "n_group": _ONE_GROUP,
                "topk_group": _ONE_GROUP,
                "norm_topk_prob": ((True,), "weights that do not sum to one are not supported"),
                "scoring_func": (("sigmoid",), "only sigmoid is supported"),
                "topk_method": (("noaux_tc",), "only noaux_tc is supported"),
            },
            head_dim=128,
            rotary=RotaryRules(partial=0.5),
            mixture=mixtures.glm_experts,
        ),
        _HYBRID,
        replace(
            _HYBRID,
            architecture="Qwen3_5MoeForCausalLM",
            name="qwen3_5_moe_text",
            parsed=_HYBRID.parsed | _SHARED_EXPERT,
            needed=_HYBRID.needed | _SHARED_EXPERT,
            neutral={
                **_HYBRID.neutral,
                "norm_topk_prob": ((True,), "weights that do not sum to one are not supported"),
                "decoder_sparse_step": ((1,), "dense layers are not supported"),
            },
            mixture=mixtures.qwen_next_experts,
            defaults={"intermediate_size": 512},
        ),
        replace(
            _HYBRID,
            architecture="Qwen3NextForCausalLM",
            name="qwen3_next",
            parsed=_HYBRID_KEYS
            | _SHARED_EXPERT
            | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"},
            needed=_HYBRID.needed | _SHARED_EXPERT,
            mixture=mixtures.qwen_next_experts,
            fused=("gated_q", "linear_qkvz", "linear_ba", "linear_convolution"),
        ),
        Family(
            "GptOssForCausalLM",
            "gpt_oss",
            parsed=_WINDOW | _MIXTRAL_EXPERTS | {"initial_context_length"},
            needed=_MIXTRAL_EXPERTS | _WINDOW,
            neutral={
                "attention_bias": ((True,), "a checkpoint without biases is not supported"),
                "swiglu_limit": ((CLAMP_LIMIT,), f"only {CLAMP_LIMIT} is supported"),
                "swiglu_alpha": ((CLAMP_STEEPNESS,), f"only {CLAMP_STEEPNESS} is supported"),
            },
            windows=every_other_stated,
            head_dim=64,
            attention_bias=True,
            row_bias=True,
            sinks=True,
            rotary=RotaryRules(theta=150000.0, scaling_stated=True),
            dtype="bfloat16",
            mixture=mixtures.gpt_oss_experts,
            stacked=True,
        ),
    )
}
"""Supported architectures."""

_POOLED = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "gemma2": "Gemma2", "gemma3_text": "Gemma3Text",
}  # fmt: skip
_HEADS = {"Model": "none", "ForSequenceClassification": "labels"}

OTHER_HEADS = {
    f"{_POOLED[family.name]}{ending}": (family, head)
    for family in FAMILIES.values()
    if family.name in _POOLED
    for ending, head in _HEADS.items()
}
"""Architectures of these families without an output head: the family, and `ModelConfig.head`."""

FAMILY_NAMES = tuple(family.name for family in FAMILIES.values())
