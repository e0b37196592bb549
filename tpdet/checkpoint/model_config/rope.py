"""Parses the settings of the rotary embedding, in the form of transformers 4 or 5.

Version 4 has `rope_theta` beside `rope_scaling`, whose kind is its `rope_type` or `type`. Version 5
has everything in `rope_parameters`. Kinds whose frequencies depend on the context length are
refused. Linear and YaRN scaling multiply the context: the pages of both say to leave
`max_position_embeddings` alone. Of longrope, whose factors change past its original context, the
short ones are used and the context ends there (`Rotary.context`).
"""

import math
from dataclasses import replace
from typing import NamedTuple

from tpdet.checkpoint.model_config.fields import LEAST, MAX_INTEGER, MOST, Fields
from tpdet.checkpoint.model_config.keys import DEFAULT_THETA
from tpdet.kernels.exact.rotary_frequencies import RotarySpec

_KINDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
        "mscale_all_dim truncate finetuned".split()  # the last is a note
    ),
    "longrope": frozenset(
        "short_factor long_factor factor original_max_position_embeddings attention_factor".split()
    ),
}
_OLD_NAMES = {"su": "longrope"}
_STRETCHED = ("linear", "yarn")
"""Kinds that make a context of `factor` times the original one."""
_QUERY_GROWTH = "llama_4_scaling_beta"
_ORIGINAL = "original_max_position_embeddings"
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Base(NamedTuple):
    """Where the base stands outside `rope_parameters`, and what it is where it stands nowhere."""

    key: str
    default: float


class RotaryRules(NamedTuple):
    """How a family's rotary settings differ from Llama's.

    theta: the base where no key says it. window: where the base of layers with a window stands, if
    they rotate otherwise, without scaling. partial: the part of a head that is rotated where no key
    says so; None: always whole heads. settings: keys of `rope_parameters` beside those of the kind
    of scaling. context_stated: whether `max_position_embeddings` counts the scaling in, also of
    linear scaling. scaling_stated: whether the scaling must be stated, because transformers assumes
    one where it is absent.
    """

    theta: float = DEFAULT_THETA
    window: Base | None = None
    partial: float | None = None
    settings: frozenset[str] = frozenset()
    context_stated: bool = False
    scaling_stated: bool = False


class Rotary(NamedTuple):
    """Rotary embeddings of a model.

    plain: of all layers, or of those without a window; window: of those with one, None for the
    same. context: in tokens; it ends where one table and one scale of queries no longer hold, for
    past the original context longrope has other factors and Ministral 3 scales its queries.
    """

    plain: RotarySpec
    window: RotarySpec | None
    context: int


def parse_rotary(config: Fields, head_dim: int, max_position: int, rules: RotaryRules) -> Rotary:
    """The rotary embeddings of a configuration.

    Raises CheckpointError for a kind other than default, linear, llama3, yarn and longrope, for an
    unknown key, a partial rotation that the family has not, and settings that contradict each
    other.
    """
    if rules.scaling_stated and "rope_scaling" not in config and "rope_parameters" not in config:
        family = config.text("model_type")
        config.refuse("rope_scaling", f"a complete config.json of {family} states it")

    def parse(scaling: Fields, base: Base) -> tuple[RotarySpec, int]:
        theta = _theta(config, scaling, base)
        spec = _parse(config, scaling, theta, head_dim, max_position, rules)
        return spec, _context(config, scaling, spec, max_position, rules.context_stated)

    base = Base("rope_theta", rules.theta)
    if rules.window is None:
        plain, context = parse(_scaling(config), base)
        return Rotary(plain, None, context)
    full, sliding = _by_layer_type(config)
    (plain, context), (window, window_context) = parse(full, base), parse(sliding, rules.window)
    contexts = context, window_context
    most = min(contexts) if min(contexts) < max_position else max(contexts)
    return Rotary(plain, None if window == plain else window, most)


def _parse(
    config: Fields,
    scaling: Fields,
    theta: float,
    head_dim: int,
    max_position: int,
    rules: RotaryRules,
) -> RotarySpec:
    kind = _kind(scaling)
    if kind not in _KINDS:
        scaling.refuse(
            "rope_type" if "rope_type" in scaling else "type",
            "only default, linear, llama3, yarn and longrope scaling are supported",
        )
    known = _COMMON | _KINDS[kind] | rules.settings
    scaling.only(known, f"no such setting of {kind} rotary scaling is known")
    spec = RotarySpec(kind, theta, _rotated(config, scaling, head_dim, rules.partial))
    if kind == "longrope":
        return _longrope(config, scaling, spec, max_position)
    if kind == "default":
        return spec
    original = _original(config, scaling, max_position)
    ratio = max_position / original if kind == "yarn" and scaling.has_null("factor") else None
    factor = scaling.number("factor", ratio)
    if factor < 1.0:
        scaling.refuse("factor", "it must be at least 1")
    spec = replace(spec, factor=factor)
    if kind == "linear":
        return spec
    spec = replace(spec, original_max_position=original)
    return _llama3(scaling, spec) if kind == "llama3" else _yarn(scaling, spec)


def _context(
    config: Fields, scaling: Fields, spec: RotarySpec, max_position: int, stated: bool
) -> int:
    original = _original(config, scaling, max_position)
    grows = scaling.number(_QUERY_GROWTH, 0.0, above=-1.0) != 0.0
    if spec.kind == "longrope" or grows:
        return min(max_position, original)
    if spec.kind not in _STRETCHED or stated:
        return max_position
    return max(max_position, int(min(original * spec.factor, MAX_INTEGER)))


def _original(config: Fields, scaling: Fields, max_position: int) -> int:
    """The context of the first training, inside the scaling or outside."""
    found = scaling.integer(_ORIGINAL, config.integer(_ORIGINAL, max_position))
    if _ORIGINAL in config and config.integer(_ORIGINAL) != found:
        config.refuse(_ORIGINAL, f"the rotary scaling says {found}, keep one of them")
    return found


def _rotated(config: Fields, scaling: Fields, head_dim: int, partial: float | None) -> int:
    """How many values of a head are rotated."""
    key = "partial_rotary_factor"
    place = scaling if key in scaling else config
    factor = place.number(key, 1.0 if partial is None else partial)
    if partial is None and factor != 1.0:
        place.refuse(key, "only fully rotated heads are supported")
    rotated = int(head_dim * factor)
    if factor > 1.0 or rotated < 2 or rotated % 2:
        place.refuse(key, f"it must leave an even number of a head's {head_dim} values to rotate")
    return rotated


def _longrope(config: Fields, scaling: Fields, spec: RotarySpec, max_position: int) -> RotarySpec:
    short = _factors(scaling, "short_factor", spec.dim)
    _factors(scaling, "long_factor", spec.dim)
    original = _original(config, scaling, max_position)
    factor = scaling.number("factor", max_position / original)
    attention = scaling.optional_number("attention_factor")
    if attention is None:
        grown = 1 + math.log(factor) / math.log(original) if factor > 1 and original > 1 else 1.0
        attention = math.sqrt(grown)
    return replace(
        spec, original_max_position=original, attention_factor=attention, frequency_factors=short
    )


def _factors(scaling: Fields, key: str, dim: int) -> tuple[float, ...]:
    """One factor a frequency, above 0."""
    values = scaling.raw(key)
    if not isinstance(values, list) or len(values) != dim // 2:
        scaling.refuse(key, f"longrope needs a list of {dim // 2} numbers")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not LEAST <= value <= MOST:
            scaling.refuse(key, f"every factor must be a number in [{LEAST:g}, {MOST:g}]")
    return tuple(map(float, values))


def _scaling(config: Fields) -> Fields:
    """The object with the settings; an empty one if there is none."""
    old, new = config.inner("rope_scaling"), config.inner("rope_parameters")
    both = old is not None and new is not None
    if both and config.raw("rope_scaling") != config.raw("rope_parameters"):
        config.refuse("rope_scaling", "rope_parameters says otherwise, keep one of them")
    return new or old or Fields({}, "config.json", "rope_scaling")


def _by_layer_type(config: Fields) -> tuple[Fields, Fields]:
    """The settings of layers without a window and of those with one; old keys scale the former."""
    both, empty = config.inner("rope_parameters"), Fields({}, "config.json", "rope_parameters")
    if both is None:
        return _scaling(config), empty
    if "rope_scaling" in config:
        config.refuse("rope_scaling", "rope_parameters is there too, keep one of them")
    both.only(frozenset({_FULL, _SLIDING}), f"this family names {_FULL} and {_SLIDING} here")
    return both.inner(_FULL) or empty, both.inner(_SLIDING) or empty


def _kind(scaling: Fields) -> str:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if "type" in scaling and scaling.text("type") != kind:
        scaling.refuse("type", f"rope_type says {kind!r}, keep one of them")
    return _OLD_NAMES.get(kind, kind)


def _theta(config: Fields, scaling: Fields, base: Base) -> float:
    # A base of 1 or less has no wavelengths; yarn divides by its logarithm.
    outside = config.number(base.key, base.default, above=1.0)
    theta = scaling.number("rope_theta", outside, above=1.0)
    if base.key in config and theta != outside:
        scaling.refuse("rope_theta", f"{base.key} outside is {outside:g}, keep one of them")
    return theta


def _llama3(scaling: Fields, spec: RotarySpec) -> RotarySpec:
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor")
    if low >= high:
        scaling.refuse("low_freq_factor", f"it must be below high_freq_factor {high:g}")
    return replace(spec, low_freq_factor=low, high_freq_factor=high)


def _yarn(scaling: Fields, spec: RotarySpec) -> RotarySpec:
    fast, slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    if fast < slow:
        scaling.refuse("beta_fast", f"it must not be below beta_slow {slow:g}")
    return replace(
        spec,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=scaling.optional_number("attention_factor"),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        truncate=scaling.boolean("truncate", True),
    )
