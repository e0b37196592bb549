"""The flags of `tpdet quantise`."""

from pathlib import Path

from tpdet.arguments.flags import flag
from tpdet.client.command import Command

FORMATS = ("fp8-block", "int4-g128", "mxfp4")
"""The keys of `tpdet.tools.quantise.encodings.ENCODINGS`, which needs torch."""
_FLAGS = (
    flag("model", "Hugging Face directory or hub name, its weights in float32, bfloat16, float16"),
    flag("--format", "of the weights of products", choices=FORMATS, required=True),
    flag("--output", "a new or empty folder", type=Path, required=True, metavar="DIR"),
)

QUANTISE = Command(
    name="quantise",
    run="tpdet.tools.quantise.command:quantise_command",
    flags=_FLAGS,
    description="Write MODEL as a checkpoint of compressed-tensors, every weight rounded to "
    "the nearest.\nNo calibration: the same model gives the same bytes everywhere.",
    epilog="  tpdet quantise models/small --format int4-g128 --output models/small-int4",
)
