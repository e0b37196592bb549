"""Which layers of a hybrid are linear, and the heads of these, as families state them."""

from tpdet.checkpoint.model_config.fields import Fields
from tpdet.checkpoint.model_config.model import LinearAttention
from tpdet.kernels.order import CONVOLUTION_TAPS

LINEAR_KEYS = frozenset(
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
    "linear_conv_kernel_dim".split()
)
_FULL, _LINEAR = "full_attention", "linear_attention"
_INTERVAL, _DEFAULT_INTERVAL = "full_attention_interval", 4
_TYPES = "layer_types"
_MOST_HEADS, _MOST_SIZE = 1 << 12, 256


def no_linear(config: Fields, layers: int) -> LinearAttention | None:
    """Attention on every layer."""
    return None


def no_window(config: Fields, layers: int) -> tuple[int | None, ...]:
    """No window on any layer; `layer_types` says which are linear."""
    return (None,) * layers


def qwen_linear(config: Fields, layers: int) -> LinearAttention | None:
    """Qwen3-Next and Qwen3.5: gated delta-net layers; None where all layers have attention.

    Raises CheckpointError for lists that contradict each other, for other convolutions, and for
    heads that do not fit.
    """
    linear = _layers(config, layers)
    if "mtp_num_hidden_layers" in config:
        config.integer("mtp_num_hidden_layers", low=0)
    width = config.integer("linear_conv_kernel_dim")
    if width != CONVOLUTION_TAPS:
        config.refuse("linear_conv_kernel_dim", f"only {CONVOLUTION_TAPS} is supported")
    keys = config.integer("linear_num_key_heads", high=_MOST_HEADS)
    values = config.integer("linear_num_value_heads", high=_MOST_HEADS)
    if values % keys:
        config.refuse("linear_num_value_heads", f"it must be a multiple of {keys} key heads")
    sizes = [_size(config, f"linear_{part}_head_dim") for part in ("key", "value")]
    return LinearAttention(linear, keys, values, *sizes) if any(linear) else None


def _size(config: Fields, key: str) -> int:
    size = config.integer(key, high=_MOST_SIZE)
    if size % 8:
        config.refuse(key, f"only multiples of 8 up to {_MOST_SIZE} are supported")
    return size


def _layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """Whether each layer is linear, by `layer_types`, or by `full_attention_interval`."""
    interval = config.integer(_INTERVAL, _DEFAULT_INTERVAL)
    by_interval = tuple((i + 1) % interval != 0 for i in range(layers))
    if _TYPES not in config:
        linear = by_interval
    else:
        remedy = f"it must list one type for each of the {layers} layers"
        types = config.items(_TYPES, str, remedy)
        if len(types) != layers:
            config.refuse(_TYPES, remedy)
        for kind in types:
            if kind not in (_FULL, _LINEAR):
                config.refuse(_TYPES, f"{kind!r} is not supported, only {_FULL} and {_LINEAR}")
        linear = tuple(kind == _LINEAR for kind in types)
        if _INTERVAL in config and linear != by_interval:
            first = next(i for i in range(layers) if linear[i] != by_interval[i])
            config.refuse(
                _INTERVAL,
                f"by it layer {first} is {_LINEAR if by_interval[first] else _FULL}, {_TYPES} says "
                f"{types[first]}: keep one of them",
            )
    if all(linear):
        config.refuse(
            _TYPES if _TYPES in config else _INTERVAL,
            f"no layer has {_FULL}: a model of linear layers alone is not supported",
        )
    return linear
