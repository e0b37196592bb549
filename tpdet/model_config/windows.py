"""Sliding windows per layer, as transformers applies them in each family."""

from tpdet.model_config.fields import Fields
from tpdet.model_config.keys import DEFAULT_MAX_WINDOW_LAYERS, DEFAULT_WINDOW

_SLIDING = "sliding_attention"
_FULL = "full_attention"


def parse_windows(config: Fields, family: str, layers: int) -> tuple[int | None, ...]:
    """Each layer's window in tokens (itself counted), None for full attention.

    Mistral: `sliding_window` on every layer; absent means 4096, null none. Qwen: only with
    `use_sliding_window`, on the layers that `layer_types` names, else from `max_window_layers` on.
    Raises CheckpointError when these contradict each other.
    """
    if family == "mistral":
        return (_mistral_window(config),) * layers
    if family in ("qwen2", "qwen3"):
        return _qwen_windows(config, layers)
    return (None,) * layers


def _mistral_window(config: Fields) -> int | None:
    if config.has_null("sliding_window"):
        return None
    return config.integer("sliding_window", DEFAULT_WINDOW)


def _qwen_windows(config: Fields, layers: int) -> tuple[int | None, ...]:
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
