"""How families give each layer its sliding window, or no rotary, as transformers does.

A window is the number of tokens that a token sees, itself among them; None is full attention. Each
function takes the fields of `config.json` and the number of layers, and returns one window a layer.
"""

from collections.abc import Sequence

from tpdet.checkpoint.model_config.fields import Fields
from tpdet.checkpoint.model_config.keys import (
    DEFAULT_MAX_WINDOW_LAYERS,
    DEFAULT_NO_ROPE_INTERVAL,
    DEFAULT_WINDOW,
)

_SLIDING = "sliding_attention"
_FULL = "full_attention"


def no_layer(config: Fields, layers: int) -> tuple[int | None, ...]:
    """Full attention on every layer (Llama)."""
    return _by_type(config, layers, None, [False] * layers)


def every_layer(config: Fields, layers: int) -> tuple[int | None, ...]:
    """The window `sliding_window` on every layer (Mistral): 4096 if absent, none if null."""
    window = None
    if not config.has_null("sliding_window"):
        window = config.integer("sliding_window", DEFAULT_WINDOW)
    return _on_every(window, config, layers)


def if_stated(config: Fields, layers: int) -> tuple[int | None, ...]:
    """The window `sliding_window` on every layer (Phi-3, Ministral 3); none if absent or null."""
    window = config.integer("sliding_window") if "sliding_window" in config else None
    return _on_every(window, config, layers)


def switched_by_layer(config: Fields, layers: int) -> tuple[int | None, ...]:
    """The window `sliding_window` on some layers, if `use_sliding_window` is true (Qwen).

    `layer_types` names the layers; without it they are those from `max_window_layers` on. Raises
    CheckpointError if these keys contradict each other.
    """
    window = None
    if config.boolean("use_sliding_window", False) and not config.has_null("sliding_window"):
        window = config.integer("sliding_window", DEFAULT_WINDOW)
    first = config.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, low=0)
    return _by_type(config, layers, window, [i >= first for i in range(layers)])


def where_not_rotated(config: Fields, layers: int) -> tuple[int | None, ...]:
    """As `switched_by_layer`, but without `layer_types` on the layers without rotary (SmolLM3)."""
    window = None
    if config.boolean("use_sliding_window", False) and "sliding_window" in config:
        window = config.integer("sliding_window")
    rotated = rotary_layers(config, layers) or (True,) * layers
    return _by_type(config, layers, window, [not each for each in rotated])


def three_of_four(config: Fields, layers: int) -> tuple[int | None, ...]:
    """The window `sliding_window`, 4096 if absent, on all but every fourth layer (OLMo-3)."""
    return _but_every(4, config, layers)


def every_other(config: Fields, layers: int) -> tuple[int | None, ...]:
    """As `three_of_four`, on the first of every two layers (Gemma 2).

    Raises CheckpointError where `sliding_window_size`, the older name, says otherwise.
    """
    found = _but_every(2, config, layers)
    key = "sliding_window_size"
    if key in config and config.integer(key) != config.integer("sliding_window", DEFAULT_WINDOW):
        config.refuse(key, "sliding_window says otherwise, keep one of them")
    return found


def every_other_stated(config: Fields, layers: int) -> tuple[int | None, ...]:
    """As `every_other`, and `sliding_window` must be stated (gpt-oss)."""
    config.integer("sliding_window")
    return _but_every(2, config, layers)


def by_pattern(config: Fields, layers: int) -> tuple[int | None, ...]:
    """As `three_of_four`, every `sliding_window_pattern`-th, by default the sixth (Gemma 3)."""
    return _but_every(config.integer("sliding_window_pattern", 6), config, layers)


def _on_every(window: int | None, config: Fields, layers: int) -> tuple[int | None, ...]:
    """One window on every layer, with which `layer_types` must agree: the family has no other."""
    if len(set(_by_type(config, layers, window, [True] * layers)) | {window}) > 1:
        config.refuse("layer_types", "layers of this family are alike: name one type, or none")
    return (window,) * layers


def _but_every(period: int, config: Fields, layers: int) -> tuple[int | None, ...]:
    """The window on the sliding layers of `layer_types`, or on all but every `period`-th."""
    if config.has_null("sliding_window"):
        config.refuse("sliding_window", "layers with a window need one")
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    return _by_type(config, layers, window, [(i + 1) % period != 0 for i in range(layers)])


def rotary_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers rotate their heads (SmolLM3); () if all do.

    `no_rope_layers` has a 1 for each that does; without it every `no_rope_layer_interval`-th, the
    fourth by default, does not. Raises CheckpointError.
    """
    interval = config.integer("no_rope_layer_interval", DEFAULT_NO_ROPE_INTERVAL)
    values = config.raw("no_rope_layers")
    if values is None:
        values = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(values, list) or len(values) < layers:
        config.refuse("no_rope_layers", f"it must have a 0 or 1 for each of the {layers} layers")
    if any(type(value) is not int or value not in (0, 1) for value in values):
        config.refuse("no_rope_layers", "it must list 0 and 1, a 0 for a layer without rotary")
    found = tuple(value == 1 for value in values[:layers])
    return () if all(found) else found


def _by_type(
    config: Fields, layers: int, window: int | None, default: Sequence[bool]
) -> tuple[int | None, ...]:
    """The window on the layers that `layer_types` calls sliding, without it where `default`."""
    types = config.raw("layer_types")
    if types is None:
        return tuple(window if slides else None for slides in default)
    if not isinstance(types, list) or len(types) != layers:
        config.refuse("layer_types", f"it must list one type for each of the {layers} layers")
    for kind in types:
        if kind not in (_SLIDING, _FULL):
            config.refuse("layer_types", f"{kind!r} is not supported, only {_FULL} and {_SLIDING}")
    if _SLIDING in types and window is None:
        config.refuse("layer_types", "sliding layers need use_sliding_window and sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in types)
