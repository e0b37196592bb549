"""Parses `quantization_config`: how a checkpoint's weights are stored, in one known form or more.

Weights become numbers when they are loaded (`tpdet.checkpoint.forms.quantised`). What a checkpoint
says of activations does not count: they are not quantised.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpdet.checkpoint.model_config.fields import Fields

_GROUPS = (32, 64, 128)
_BLOCK = [128, 128]
_MXFP4_GROUP = 32


@dataclass(frozen=True)
class Quantisation:
    """How the weights of products are stored.

    kind: a key of `forms.quantised_forms.FORMS`; bits: of a value; group: values along K that
    share a scale, 0 for all of a row; zero_points: whether they are stored; zero_offset: what is
    added to a stored zero point; scale: the suffix of the scales of fp8.
    """

    kind: str
    bits: int
    group: int
    zero_points: bool = False
    zero_offset: int = 0
    scale: str = ".weight_scale"

    @property
    def rule(self) -> str:
        """The name of the rule, a part of the model digest."""
        group = f"group {self.group}" if self.group else "channel"
        return f"{self.kind} {self.bits} bits, {group}"


@dataclass(frozen=True)
class Quantisations:
    """What a checkpoint says of its quantised weights: their forms, each once, in its order.

    Which matrix has which form is seen in the files. ignored: modules that it says are not
    quantised; activations: whether it wants activations quantised, too.
    """

    forms: tuple[Quantisation, ...]
    ignored: frozenset[str]
    activations: bool = False


def parse_quantisation(config: Fields) -> Quantisations | None:
    """The forms of a checkpoint's weights; None if they are not quantised.

    Raises CheckpointError naming the key for a method, format, group size or key that is not known.
    """
    found = config.inner("quantization_config")
    if found is None:
        return None
    method = found.text("quant_method")
    known = (*_METHODS, "compressed-tensors")
    if method not in known:
        found.refuse("quant_method", f"only {', '.join(known)} are supported")
    ignored = frozenset(name for key in _IGNORED if key in found for name in _names(found, key))
    if method == "compressed-tensors":
        forms, activations = _compressed(found)
        return Quantisations(tuple(dict.fromkeys(forms)), ignored, activations)
    return Quantisations((_METHODS[method](found),), ignored, activations=method == "fp8")


def _names(found: Fields, key: str) -> list[str]:
    return found.items(key, str, "it must be a list of names of modules")


def _fp8(found: Fields) -> Quantisation:
    _only(found, "fmt activation_scheme weight_block_size modules_to_not_convert ignored_layers")
    _is(found, "fmt", ("e4m3", None), "only e4m3 is supported")
    _is(found, "activation_scheme", ("dynamic", None), "only dynamic is supported")
    _is(found, "weight_block_size", (_BLOCK,), f"only blocks of {_BLOCK} are supported")
    return Quantisation("fp8 block", 8, _BLOCK[1], scale=".weight_scale_inv")


def _awq(found: Fields) -> Quantisation:
    _only(
        found,
        "bits group_size zero_point version modules_to_not_convert backend do_fuse "
        "exllama_config fuse_max_seq_len modules_to_fuse",
    )
    _is(found, "bits", (4,), "only 4 bits are supported")
    _is(found, "zero_point", (True,), "only AWQ with zero points is supported")
    _is(found, "version", ("gemm", "GEMM", None), "only the layout gemm is supported")
    return Quantisation("awq", 4, _group(found), zero_points=True)


def _gptq(found: Fields) -> Quantisation:
    _only(
        found,
        "bits group_size desc_act sym checkpoint_format damp_percent true_sequential "
        "static_groups model_name_or_path model_file_base_name lm_head quantizer dataset tokenizer "
        "meta pack_dtype use_exllama exllama_config disable_exllama cache_block_outputs "
        "block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id "
        "use_cuda_fp16 model_seqlen max_input_length modules_in_block_to_quantize backend "
        "is_marlin_format",
    )
    _is(found, "bits", (4,), "only 4 bits are supported")
    _is(found, "desc_act", (False, None), "columns in the order of activations are not supported")
    _is(found, "checkpoint_format", ("gptq", "gptq_v2", None), "only gptq and gptq_v2 are known")
    _is(found, "is_marlin_format", (False, None), "only the layout gptq is supported")
    _is(found, "pack_dtype", ("int32", None), "only int32 is supported")
    offset = 0 if found.raw("checkpoint_format") == "gptq_v2" else 1
    return Quantisation("gptq", 4, _group(found), zero_points=True, zero_offset=offset)


def _mxfp4(found: Fields) -> Quantisation:
    _only(found, "modules_to_not_convert dequantize")
    return Quantisation("mxfp4", 4, _MXFP4_GROUP)


def _compressed(found: Fields) -> tuple[list[Quantisation], bool]:
    """The form of each group, and whether one of them wants activations quantised."""
    _only(
        found,
        "format config_groups ignore kv_cache_scheme quantization_status sparsity_config "
        "transform_config global_compression_ratio version moe_sparsity_config",
    )
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config"):
        _is(found, key, (None, {}), "it is not supported")
    groups = found.inner("config_groups")
    names = sorted(found.raw("config_groups") or ())
    if groups is None or not names:
        found.refuse("config_groups", "without a group nothing is quantised")
    whole = found.text("format")
    if whole not in (*_FORMATS, _MIXED):
        found.refuse("format", f"only {', '.join(_FORMATS)} and {_MIXED} are supported")
    forms, activations = [], False
    for name in names:
        group = groups.inner(name)
        if group is None:
            groups.refuse(name, "it must be an object")
        forms.append(_of_group(group, whole))
        activations |= "input_activations" in group
    return forms, activations


def _of_group(group: Fields, whole: str) -> Quantisation:
    """The form of a group; whole: the format that stands beside all groups."""
    group.only(
        frozenset({"targets", "weights", "input_activations", "output_activations", "format"}),
        "tpdet cannot tell whether it changes the weights",
    )
    _names(group, "targets")
    _is(group, "output_activations", (None,), "it is not supported")
    weights = group.inner("weights")
    if weights is None:
        group.refuse("weights", "without it nothing is quantised")
    form = group.text("format", None if whole == _MIXED else whole)
    if form not in _FORMATS or whole not in (_MIXED, form):
        group.refuse("format", f"beside {whole} only {', '.join(_FORMATS)} are supported")
    return _of_weights(form, weights)


def _of_weights(form: str, weights: Fields) -> Quantisation:
    weights.only(
        frozenset(
            "num_bits type strategy group_size symmetric dynamic actorder observer observer_kwargs "
            "block_structure scale_dtype zp_dtype".split()
        ),
        "tpdet cannot tell whether it changes the weights",
    )
    _is(weights, "dynamic", (False, None), "weights have fixed scales")
    _is(
        weights,
        "actorder",
        (None, False, "weight", "static"),
        "columns in another order are refused",
    )
    of_type, bits, kinds = _FORMATS[form]
    _is(weights, "type", (of_type,), f"{form} goes with {of_type}")
    _is(weights, "num_bits", bits, f"{form} with {' or '.join(map(str, bits))} bits is supported")
    _is(weights, "strategy", tuple(kinds), f"only {' and '.join(kinds)} are supported")
    strategy = weights.text("strategy")
    kind, symmetric = kinds[strategy], weights.boolean("symmetric", True)
    if kind != "packed int" and not symmetric:
        weights.refuse("symmetric", f"{form} has no zero points")
    group = _group(weights) if strategy == "group" else 0
    if kind == "mxfp4" and group != _MXFP4_GROUP:
        weights.refuse("group_size", f"MXFP4 has groups of {_MXFP4_GROUP}")
    if strategy == "block":
        _is(weights, "block_structure", (_BLOCK,), f"only blocks of {_BLOCK} are supported")
        group = _BLOCK[1]
    return Quantisation(kind, weights.integer("num_bits"), group, not symmetric)


def _group(found: Fields) -> int:
    """The group size; 0 for -1, one scale for all of a row."""
    _is(
        found, "group_size", (*_GROUPS, -1), f"only {', '.join(map(str, _GROUPS))} and -1 are known"
    )
    return max(0, int(found.raw("group_size")))


def _only(found: Fields, keys: str) -> None:
    found.only(frozenset(keys.split()) | {"quant_method"}, "tpdet cannot tell what it changes")


def _is(found: Fields, key: str, allowed: tuple[Any, ...], remedy: str) -> None:
    value = found.raw(key)
    if not any(value == each and type(value) is type(each) for each in allowed):
        found.refuse(key, remedy)


_IGNORED = ("ignore", "modules_to_not_convert", "ignored_layers")
_METHODS: dict[str, Callable[[Fields], Quantisation]] = {
    "fp8": _fp8, "awq": _awq, "gptq": _gptq, "mxfp4": _mxfp4,
}  # fmt: skip
"""Methods that have one form; compressed-tensors may have several."""
_MIXED = "mixed-precision"
_FP8 = "float", (8,), {"channel": "fp8 channel", "block": "fp8 block"}
_FORMATS: dict[str, tuple[str, tuple[int, ...], dict[str, str]]] = {
    "float-quantized": _FP8,
    "naive-quantized": _FP8,
    "pack-quantized": ("int", (4, 8), {"group": "packed int", "channel": "packed int"}),
    "mxfp4-pack-quantized": ("float", (4,), {"group": "mxfp4"}),
}
"""(type, bits, the kind of each strategy) of the formats of compressed-tensors."""
