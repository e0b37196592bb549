"""The flags of `tpdet compile`. Nothing heavy is imported before it runs."""

import argparse
from pathlib import Path

from tpdet.client.engine_settings import add_engine_settings
from tpdet.kernels.cuda.hardware import KNOWN

LEFT_OUT = (
    "device", "approximate", "kernel_cache", "compile_ahead", "tokenizer", "skip_tokenizer_init",
    "chat_template", "chat_template_date", "enable_prefix_caching", "load_format",
)  # fmt: skip
"""Settings on which no compiled kernel depends; approximate answers come from a library's."""


def add_compile(commands: argparse._SubParsersAction) -> None:
    """Add `compile` to the commands of `tpdet`."""
    command = commands.add_parser(
        "compile",
        description="Compile every kernel that a start of MODEL would, for a GPU that need not be "
        "there.\nGive the settings of the start: others may need other kernels.",
        epilog="  tpdet compile MODEL --gpu h200 --tp 1,2,4 --output kernels\n"
        "  tpdet serve MODEL --tp 2 --kernel-cache kernels",
    )
    command.add_argument("model", nargs="?", help="Hugging Face directory; only its config.json")
    command.add_argument("--gpu", required=True, metavar="NAME", help=" or ".join(KNOWN))
    command.add_argument(
        "--tp", default="1", metavar="SIZES", help="tensor-parallel sizes, such as 1,2,4"
    )
    command.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="a new or empty folder"
    )
    add_engine_settings(command, LEFT_OUT)
    command.set_defaults(run=_compile)


def _compile(options: argparse.Namespace) -> int:
    from tpdet.tools.compile.command import compile_command

    return compile_command(options)
