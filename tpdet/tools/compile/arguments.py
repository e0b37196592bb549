"""The flags of `tpdet compile`."""

from pathlib import Path

from tpdet.arguments.flags import flag
from tpdet.client.command import Command
from tpdet.kernels.cuda.hardware import KNOWN

LEFT_OUT = (
    "device", "approximate", "kernel_cache", "compile_ahead", "tokenizer", "skip_tokenizer_init",
    "chat_template", "chat_template_date", "enable_prefix_caching", "load_format", "weights",
)  # fmt: skip
"""Settings on which no compiled kernel depends; approximate answers come from a library's."""
_FLAGS = (
    flag("model", "Hugging Face directory; only its config.json", nargs="?"),
    flag("--gpu", " or ".join(KNOWN), required=True, metavar="NAME"),
    flag("--tp", "tensor-parallel sizes, such as 1,2,4", default="1", metavar="SIZES"),
    flag("--output", "a new or empty folder", type=Path, required=True, metavar="DIR"),
)

COMPILE = Command(
    name="compile",
    run="tpdet.tools.compile.command:compile_command",
    flags=_FLAGS,
    description="Compile every kernel that a start of MODEL would, for a GPU that need not be "
    "there.\nGive the settings of the start: others may need other kernels.",
    epilog="  tpdet compile MODEL --gpu h200 --tp 1,2,4 --output kernels\n"
    "  tpdet serve MODEL --tp 2 --kernel-cache kernels",
    without=LEFT_OUT,
)
