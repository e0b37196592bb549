"""The flags of `tpdet plan`. Nothing heavy is imported before it runs."""

import argparse
from pathlib import Path

from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS


def add_plan(commands: argparse._SubParsersAction) -> None:
    """Add `plan` to the commands of `tpdet`."""
    command = commands.add_parser(
        "plan", help="memory, time and capacity of a model on GPUs, without them",
        allow_abbrev=False,
    )  # fmt: skip
    command.add_argument("--model", help="a directory, a cached hub name, or a well-known shape")
    command.add_argument("--config", type=Path, help="a run's settings; flags win over them")
    command.add_argument("--gpu", default="h200", help="a GPU with measured constants")
    command.add_argument("--nodes", type=int, help="hosts (default 1)")
    command.add_argument("--gpus-per-node", type=int, help="GPUs of a host (default 8)")
    command.add_argument("--tp", type=int, help="tensor-parallel size; the recommended one if none")
    command.add_argument("--context", type=int, help="tokens of each sequence (default 4096)")
    command.add_argument("--batch", type=int, help="sequences a world decodes (default 64)")
    command.add_argument("--budget", type=int, help="tokens in a step (default 8192)")
    command.add_argument("--leaves", type=int, help="as of tpdet serve (default 8)")
    command.add_argument("--fold-order", choices=FOLD_ORDERS,
                         help=f"default {DEFAULT_FOLD_ORDER}")  # fmt: skip
    command.add_argument("--gpu-memory-utilization", type=float, help="default 0.9")
    command.add_argument("--max-step-ms", type=float,
                         help="what a reader may wait for a token (default 50)")  # fmt: skip
    command.add_argument("--network-gbps", type=float,
                         help="gigabits a second of each GPU's adapter (default 360)")  # fmt: skip
    command.add_argument("--network-us", type=float,
                         help="microseconds between hosts, beside NCCL's (default 5)")  # fmt: skip
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument("--plot", type=Path, metavar="STEM",
                         help="draw STEM.png and STEM.svg instead: up to 64 nodes")  # fmt: skip
    command.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from tpdet.planner.command import plan_command

    return plan_command(options)
