"""The flags of `tpdet plan`; its code is imported when it runs."""

import argparse
from pathlib import Path

from tpdet.arguments.command_line import number, whole_number
from tpdet.checkpoint.model_config.known_shapes import SHAPES
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS
from tpdet.tools.plan.hardware import HARDWARE


def add_plan(commands: argparse._SubParsersAction) -> None:
    """Add `plan` to the commands of `tpdet`."""
    command = commands.add_parser(
        "plan",
        help="memory, time and capacity of a model on GPUs, without them",
        epilog="  tpdet plan --model llama-3-70b --tp 4 --context 8192 --batch 96",
    )
    command.add_argument(
        "--model",
        metavar="DIR_OR_NAME",
        help=f"a directory, a cached hub name, or one of {', '.join(SHAPES)}",
    )
    command.add_argument(
        "--draft-model",
        metavar="DIR_OR_NAME",
        help="a draft model on rank 0, named as --model is: what it takes of the KV cache",
    )
    command.add_argument("--config", type=Path, help="a run's settings; flags win over them")
    command.add_argument(
        "--gpu", default="h200", help=f"whose times were measured: {', '.join(HARDWARE)}"
    )
    command.add_argument("--nodes", type=whole_number, help="hosts (default 1)")
    command.add_argument("--gpus-per-node", type=whole_number, help="GPUs of a host (default 8)")
    command.add_argument(
        "--tp", type=whole_number, help="tensor-parallel size; the recommended one if none"
    )
    command.add_argument(
        "--context", type=whole_number, help="tokens of each sequence (default 4096)"
    )
    command.add_argument(
        "--batch", type=whole_number, help="sequences a world decodes (default 64)"
    )
    command.add_argument("--budget", type=whole_number, help="tokens in a step (default 8192)")
    command.add_argument("--leaves", type=whole_number, help="as of tpdet serve (default 8)")
    command.add_argument("--fold-order", choices=FOLD_ORDERS, help=f"default {DEFAULT_FOLD_ORDER}")
    command.add_argument("--gpu-memory-utilization", type=number, help="default 0.9")
    command.add_argument(
        "--max-step-ms", type=number, help="what a reader may wait for a token (default 50)"
    )
    command.add_argument(
        "--network-gbps", type=number, help="gigabits a second of each GPU's adapter (default 360)"
    )
    command.add_argument(
        "--network-us", type=number, help="microseconds between hosts, beside NCCL's (default 5)"
    )
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument(
        "--plot",
        type=Path,
        metavar="STEM",
        help="draw STEM.png and STEM.svg instead: up to 64 nodes",
    )
    command.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from tpdet.tools.plan.command import plan_command

    return plan_command(options)
