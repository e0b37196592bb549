"""The families of models, one entry each: names, keys of `config.json`, and parts of a layer.

Their decoder layers are in `tpdet.models.families`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tpdet.model_config.fields import Fields
from tpdet.model_config.keys import Allowed
from tpdet.model_config.model import NORMS_BEFORE, LayerNorms
from tpdet.model_config.windows import every_layer, no_layer, switched_by_layer

_BY_LAYER = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})


@dataclass(frozen=True)
class Family:
    """How a family differs from the others. The defaults are those of transformers."""

    architecture: str
    name: str
    """The `model_type` that goes with the architecture."""
    parsed: frozenset[str] = frozenset()
    """Keys of its `config.json` beside `keys.PARSED`."""
    neutral: Mapping[str, Allowed] = field(default_factory=dict)
    """Keys beside, or in place of, `keys.NEUTRAL`."""
    windows: Callable[[Fields, int], tuple[int | None, ...]] = no_layer
    """(configuration, layers) -> the sliding window of each layer."""
    head_dim: int | None = None
    """Where the key is absent; None: the hidden size over the query heads."""
    key_heads_required: bool = True
    """Else there are as many as query heads where the key is absent."""
    attention_bias: bool = False
    qk_norm: bool = False
    norm: str = "rms"
    layer_norms: LayerNorms = NORMS_BEFORE
    """As `ModelConfig.norm` and `ModelConfig.layer_norms`."""


FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            "llama",
            neutral={"sliding_window": ((), "Llama has no sliding window")},
            key_heads_required=False,
        ),
        Family(
            "MistralForCausalLM",
            "mistral",
            parsed=frozenset({"sliding_window"}),
            windows=every_layer,
        ),
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
    )
}
"""Supported architectures."""

FAMILY_NAMES = tuple(family.name for family in FAMILIES.values())
