"""What a `config.json` says of linear layers that are quantised, without any weights."""

from typing import Any

from tpdet.tools.quantise.encodings import ENCODINGS


def quantisation_config(format_name: str) -> dict[str, Any]:
    """Its `quantization_config`, in a format of `tpdet quantise`; the output head is dense."""
    encoding = ENCODINGS[format_name]
    group = {"format": encoding.format, "targets": ["Linear"], "weights": dict(encoding.weights)}
    return {
        "quant_method": "compressed-tensors",
        "format": encoding.format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
