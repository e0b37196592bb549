"""The flags of `tpdet plan`; its code is imported when it runs."""

import argparse
from pathlib import Path
from typing import Any

from tpdet.arguments.command_line import number, whole_number
from tpdet.checkpoint.model_config.known_shapes import SHAPES
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS
from tpdet.tools.plan.hardware import HARDWARE

FIGURES: tuple[tuple[str, Any, str, str], ...] = (
    ("--nodes", whole_number, "nodes", "hosts (default 1)"),
    ("--gpus-per-node", whole_number, "gpus", "GPUs of a host (default 8)"),
    ("--tp", whole_number, "tp", "tensor-parallel size; the recommended one if none"),
    ("--context", whole_number, "context", "tokens of each sequence (default 4096)"),
    ("--batch", whole_number, "batch", "sequences a world decodes (default 64)"),
    ("--budget", whole_number, "budget", "tokens in a step (default 8192)"),
    ("--leaves", whole_number, "leaves", "as of tpdet serve (default 8)"),
    ("--fold-order", FOLD_ORDERS, "fold_order", f"default {DEFAULT_FOLD_ORDER}"),
    ("--gpu-memory-utilization", number, "utilization", "default 0.9"),
    ("--max-step-ms", number, "most_ms", "what a reader may wait for a token (default 50)"),
    ("--network-gbps", number, "gbps", "gigabits a second of each GPU's adapter (default 360)"),
    ("--network-us", number, "hop_us", "microseconds between hosts, beside NCCL's (default 5)"),
)
"""Flags, each with its kind or its choices, the field of a `PlanRequest`, and its help."""


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
    for name, kind, field, text in FIGURES:
        values = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        command.add_argument(name, dest=field, help=text, **values)
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
