"""Parses the settings of the rotary embedding, in the form of transformers 4 or 5.

Version 4 has `rope_theta` beside `rope_scaling`, whose kind is its `rope_type` or `type`. Version 5
has everything in `rope_parameters`. Kinds whose frequencies depend on the context length are
refused.
"""

from tpdet.kernels.exact.rotary_frequencies import RotarySpec
from tpdet.model_config.fields import Fields
from tpdet.model_config.keys import DEFAULT_THETA

_KINDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
        "mscale_all_dim truncate".split()
    ),
}
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def parse_rotary(config: Fields, head_dim: int, max_position: int) -> RotarySpec:
    """The rotary embedding of a configuration.

    Raises CheckpointError for a kind other than default, linear, llama3 and yarn, for an unknown
    key, a partial rotation, and settings that contradict each other.
    """
    scaling = _scaling(config)
    kind = _kind(scaling)
    if kind not in _KINDS:
        scaling.refuse(
            "rope_type" if "rope_type" in scaling else "type",
            "only default, linear, llama3 and yarn scaling are supported",
        )
    scaling.only(_COMMON | _KINDS[kind], f"no such setting of {kind} rotary scaling is known")
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        scaling.refuse("partial_rotary_factor", "only fully rotated heads are supported")
    theta = _theta(config, scaling)
    if kind == "default":
        return RotarySpec("default", theta, head_dim)
    factor = scaling.number("factor")
    if factor < 1.0:
        scaling.refuse("factor", "it must be at least 1")
    if kind == "linear":
        return RotarySpec("linear", theta, head_dim, factor=factor)
    original = scaling.integer("original_max_position_embeddings", max_position)
    if kind == "llama3":
        return _llama3(scaling, theta, head_dim, factor, original)
    return _yarn(scaling, theta, head_dim, factor, original)


def _scaling(config: Fields) -> Fields:
    """The object with the settings; an empty one if there is none."""
    old, new = config.inner("rope_scaling"), config.inner("rope_parameters")
    if (
        old is not None
        and new is not None
        and config.raw("rope_scaling") != config.raw("rope_parameters")
    ):
        config.refuse("rope_scaling", "rope_parameters says otherwise, keep one of them")
    return new or old or Fields({}, "config.json", "rope_scaling")


def _kind(scaling: Fields) -> str:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if "type" in scaling and scaling.text("type") != kind:
        scaling.refuse("type", f"rope_type says {kind!r}, keep one of them")
    return kind


def _theta(config: Fields, scaling: Fields) -> float:
    # A base of 1 or less has no wavelengths; yarn divides by its logarithm.
    outside = config.number("rope_theta", DEFAULT_THETA, above=1.0)
    theta = scaling.number("rope_theta", outside, above=1.0)
    if "rope_theta" in config and theta != outside:
        scaling.refuse("rope_theta", f"rope_theta outside is {outside:g}, keep one of them")
    return theta


def _llama3(
    scaling: Fields, theta: float, head_dim: int, factor: float, original: int
) -> RotarySpec:
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor")
    if low >= high:
        scaling.refuse("low_freq_factor", f"it must be below high_freq_factor {high:g}")
    return RotarySpec(
        "llama3",
        theta,
        head_dim,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _yarn(scaling: Fields, theta: float, head_dim: int, factor: float, original: int) -> RotarySpec:
    fast, slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    if fast < slow:
        scaling.refuse("beta_fast", f"it must not be below beta_slow {slow:g}")
    return RotarySpec(
        "yarn",
        theta,
        head_dim,
        factor=factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=scaling.optional_number("attention_factor"),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        truncate=scaling.boolean("truncate", True),
    )
