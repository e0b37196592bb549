"""How families state their experts: which layers have them, how many, and who is chosen."""

from dataclasses import replace

from tpdet.checkpoint.model_config.fields import Fields
from tpdet.checkpoint.model_config.fit import EIGHTS
from tpdet.checkpoint.model_config.model import Mixture
from tpdet.kernels.inputs.activations import CLAMPED
from tpdet.kernels.inputs.experts import Routing

MAX_EXPERTS = 1 << 12
_DEFAULT_STEP = 1


def no_experts(config: Fields, layers: int) -> Mixture | None:
    """A dense model."""
    return None


def qwen_experts(config: Fields, layers: int) -> Mixture | None:
    """Qwen3-MoE: experts on every layer but some; weights sum to one if `norm_topk_prob` says so.

    A layer is dense if `mlp_only_layers` names it, or by `decoder_sparse_step`.
    """
    step = config.integer("decoder_sparse_step", _DEFAULT_STEP)
    named = config.raw("mlp_only_layers") or []
    if not isinstance(named, list) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in named
    ):
        config.refuse("mlp_only_layers", f"it must list layers, each in [0, {layers})")
    return Mixture(
        routing=_routing(config, "num_experts", config.boolean("norm_topk_prob", False)),
        width=_width(config, "moe_intermediate_size"),
        block="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        dense_layers=tuple(i for i in range(layers) if i in named or (i + 1) % step),
    )


def qwen_next_experts(config: Fields, layers: int) -> Mixture | None:
    """Qwen3-MoE's, whose weights sum to one by default, beside a shared expert with a gate."""
    experts = qwen_experts(config, layers)
    assert experts is not None
    return replace(
        experts,
        routing=_routing(config, "num_experts", config.boolean("norm_topk_prob", True)),
        shared="shared_expert",
        shared_width=config.integer("shared_expert_intermediate_size"),
        shared_gate="shared_expert_gate",
    )


def mixtral_experts(config: Fields, layers: int) -> Mixture | None:
    """Mixtral: experts on every layer; the weights of the chosen sum to one."""
    return Mixture(
        routing=_routing(config, "num_local_experts", True),
        width=_width(config, "intermediate_size"),
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )


def gpt_oss_experts(config: Fields, layers: int) -> Mixture | None:
    """gpt-oss: experts on every layer, with biases; the weights of the chosen sum to one."""
    return Mixture(
        routing=_routing(config, "num_local_experts", True),
        width=_width(config, "intermediate_size"),
        block="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        router="router",
        biased=True,
        activation=CLAMPED,
    )


def glm_experts(config: Fields, layers: int) -> Mixture | None:
    """GLM-4.5: sigmoid scores, chosen with a bias and weighted without it; a shared expert.

    The first layers are dense. Layers that guess further tokens stand behind the last.
    """
    routing = _routing(config, "n_routed_experts", True)
    scale = config.number("routed_scaling_factor", 1.0)
    width = _width(config, "moe_intermediate_size")
    guessing = "num_nextn_predict_layers"
    return Mixture(
        routing=replace(routing, sigmoid=True, scale=scale),
        width=width,
        block="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        dense_layers=tuple(range(config.integer("first_k_dense_replace", low=0, high=layers))),
        choice_bias="e_score_correction_bias",
        shared="shared_experts",
        shared_width=width * config.integer("n_shared_experts"),
        guessing_layers=config.integer(guessing, low=0, high=layers) if guessing in config else 0,
    )


def _routing(config: Fields, key: str, over_chosen: bool) -> Routing:
    experts = config.integer(key, high=MAX_EXPERTS)
    chosen = config.integer("num_experts_per_tok")
    if chosen > experts:
        config.refuse("num_experts_per_tok", f"there are {experts} experts to choose from")
    return Routing(experts, chosen, over_chosen=over_chosen)


def _width(config: Fields, key: str) -> int:
    width = config.integer(key)
    if width % EIGHTS:
        config.refuse(key, f"the width of experts must be a multiple of {EIGHTS}")
    return width
