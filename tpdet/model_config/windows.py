"""How families give each layer its sliding window, as transformers does.

A window is the number of tokens that a token sees, itself among them; None is full attention. Each
function takes the fields of `config.json` and the number of layers, and returns one window a layer.
"""

from tpdet.model_config.fields import Fields
from tpdet.model_config.keys import DEFAULT_MAX_WINDOW_LAYERS, DEFAULT_WINDOW

_SLIDING = "sliding_attention"
_FULL = "full_attention"


def no_layer(config: Fields, layers: int) -> tuple[int | None, ...]:
    """Full attention on every layer (Llama)."""
    return (None,) * layers


def every_layer(config: Fields, layers: int) -> tuple[int | None, ...]:
    """The window `sliding_window` on every layer (Mistral): 4096 if absent, none if null."""
    window = None
    if not config.has_null("sliding_window"):
        window = config.integer("sliding_window", DEFAULT_WINDOW)
    return (window,) * layers


def switched_by_layer(config: Fields, layers: int) -> tuple[int | None, ...]:
    """The window `sliding_window` on some layers, if `use_sliding_window` is true (Qwen).

    `layer_types` names the layers; without it they are those from `max_window_layers` on. Raises
    CheckpointError if these keys contradict each other.
    """
    window = None
    if config.boolean("use_sliding_window", False) and not config.has_null("sliding_window"):
        window = config.integer("sliding_window", DEFAULT_WINDOW)
    first = config.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, low=0)
    types = config.raw("layer_types")
    if types is None:
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        config.refuse("layer_types", f"it must list one type for each of the {layers} layers")
    for kind in types:
        if kind not in (_SLIDING, _FULL):
            config.refuse("layer_types", f"{kind!r} is not supported, only {_FULL} and {_SLIDING}")
    if _SLIDING in types and window is None:
        config.refuse("layer_types", "sliding layers need use_sliding_window and sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in types)
