"""Sliding windows per layer, as transformers applies them: the ways that families choose from.

A window counts tokens, itself among them; None is full attention.
"""

from tpdet.model_config.fields import Fields
from tpdet.model_config.keys import DEFAULT_MAX_WINDOW_LAYERS, DEFAULT_WINDOW

_SLIDING = "sliding_attention"
_FULL = "full_attention"


def no_layer(config: Fields, layers: int) -> tuple[int | None, ...]:
    """Full attention (Llama)."""
    return (None,) * layers


def every_layer(config: Fields, layers: int) -> tuple[int | None, ...]:
    """`sliding_window` on every layer (Mistral): absent means 4096, null none."""
    window = None
    if not config.has_null("sliding_window"):
        window = config.integer("sliding_window", DEFAULT_WINDOW)
    return (window,) * layers


def switched_by_layer(config: Fields, layers: int) -> tuple[int | None, ...]:
    """Only with `use_sliding_window` (Qwen), on some layers.

    On those that `layer_types` names, else from `max_window_layers` on. Raises CheckpointError when
    these contradict each other.
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
