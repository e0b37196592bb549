"""The flags of `tpdet tune`."""

import argparse
import math

from tpdet.arguments.flags import add_command, count, figure, file, flag, switch
from tpdet.checkpoint.model_config.known_shapes import SHAPES
from tpdet.errors import UsageError
from tpdet.kernels.order import FOLD_ORDERS
from tpdet.tools.tune import TUNED_KINDS

_FLAGS = (
    flag("model", "a directory, a cached hub name, or a model shape; in place of --model-shape",
         nargs="?", metavar="MODEL"),
    flag("--model-shape", f"a list of {', '.join(sorted(SHAPES))}, the most important first",
         default="qwen3-8b,llama-3-70b", metavar="NAMES"),
    flag("--tp", "tensor-parallel sizes, a list of 1, 2, 4, 8", default="1,2,4", metavar="SIZES"),
    flag("--row-layers",
         "fold, gather (only what it takes in addition), or both: fold,gather", default="fold"),
    flag("--fold-order", f"of row products, a list of {', '.join(FOLD_ORDERS)} (default all)",
         default=",".join(FOLD_ORDERS), metavar="NAMES"),
    flag("--kinds", f"which products, a list of {', '.join(TUNED_KINDS)} (default all)",
         default=",".join(TUNED_KINDS), metavar="NAMES"),
    count("--max-rows", "rows in a step, at most", default=8192),
    count("--repeats", "replays of each finalist", default=10),
    file("--output", "table to write (default: the package's own)"),
    figure("--seconds",
           "begin no product after these seconds; what is measured stays in the table",
           default=math.inf, metavar="N"),
    switch("--missing", "tune only what the table does not hold yet"),
    file("--times", "add all measured times, as JSON lines"),
)  # fmt: skip


def add_tune(commands: argparse._SubParsersAction) -> None:
    """Add `tune` to the commands of `tpdet`."""
    description = "Measure the GEMM variants of this GPU and write its shape table."
    add_command(commands, "tune", _tune, _FLAGS, description=description)


def _tune(options: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "tpdet tune measures GPU kernels and torch sees no GPU here: run it on the GPU that "
            "will serve (the CPU path has no shape table)"
        )
    from tpdet.tools.tune.run import tune_command

    return tune_command(options)
