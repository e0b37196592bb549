"""The flags of `tpdet tune`. Nothing heavy is imported before it runs."""

import argparse
import math
from pathlib import Path

from tpdet.arguments.command_line import number, whole_number
from tpdet.checkpoint.model_config.known_shapes import SHAPES
from tpdet.errors import UsageError
from tpdet.kernels.order import FOLD_ORDERS
from tpdet.tools.tune import TUNED_KINDS


def add_tune(commands: argparse._SubParsersAction) -> None:
    """Add `tune` to the commands of `tpdet`."""
    command = commands.add_parser(
        "tune",
        description="Measure the GEMM variants of this GPU and write its shape table.",
    )
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a directory, a cached hub name, or a model shape; in place of --model-shape",
    )
    command.add_argument(
        "--model-shape",
        default="qwen3-8b,llama-3-70b",
        metavar="NAMES",
        help=f"a list of {', '.join(sorted(SHAPES))}, the most important first",
    )
    command.add_argument(
        "--tp", default="1,2,4", metavar="SIZES", help="tensor-parallel sizes, a list of 1, 2, 4, 8"
    )
    command.add_argument(
        "--row-layers",
        default="fold",
        help="fold, gather (only what it takes in addition), or both: fold,gather",
    )
    command.add_argument(
        "--fold-order",
        default=",".join(FOLD_ORDERS),
        metavar="NAMES",
        help=f"of row products, a list of {', '.join(FOLD_ORDERS)} (default all)",
    )
    command.add_argument(
        "--kinds",
        default=",".join(TUNED_KINDS),
        metavar="NAMES",
        help=f"which products, a list of {', '.join(TUNED_KINDS)} (default all)",
    )
    _add_effort(command)
    command.set_defaults(run=_tune)


def _add_effort(command: argparse.ArgumentParser) -> None:
    """Add how much is measured, and where it goes."""
    command.add_argument(
        "--max-rows", type=whole_number, default=8192, help="rows in a step, at most"
    )
    command.add_argument(
        "--repeats", type=whole_number, default=10, help="replays of each finalist"
    )
    command.add_argument(
        "--output", type=Path, metavar="FILE", help="table to write (default: the package's own)"
    )
    command.add_argument(
        "--seconds",
        type=number,
        default=math.inf,
        metavar="N",
        help="begin no product after these seconds; what is measured stays in the table",
    )
    command.add_argument(
        "--missing", action="store_true", help="tune only what the table does not hold yet"
    )
    command.add_argument(
        "--times", type=Path, metavar="FILE", help="add all measured times, as JSON lines"
    )


def _tune(options: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "tpdet tune measures GPU kernels and torch sees no GPU here: run it on the GPU that "
            "will serve (the CPU path has no shape table)"
        )
    from tpdet.tools.tune.run import tune_command

    return tune_command(options)
