"""The flags of `tpdet verify`, and the specification they make; its code is imported later."""

import argparse

from tpdet.arguments.command_line import check_counts, results_file
from tpdet.errors import UsageError
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.tools.verify.relations import parse_relations, relations_help
from tpdet.tools.worlds.ways import (
    TRANSPORTS,
    Ways,
    launchers_help,
    parse_launchers,
    parse_transports,
)

WHOLE = {
    "relations": "all",
    "tp": "1,2,4,8",
    "dtype": "float32,bfloat16",
    "fold_order": "sequential,pairs,tree",
    "leaves": None,
    "launcher": "self",
    "transport": "auto",
    "nodes": "1",
    "row_layers": "fold",
    "batch": "1,4,16,64",
    "budget": "16,100",
    "prompt_lengths": "5,300,37",
    "tokens": 12,
}
"""The values of flags that are not given beside --all."""
SHORT = WHOLE | {
    "relations": "steps,fresh",
    "tp": "1,2",
    "dtype": "bfloat16",
    "fold_order": DEFAULT_FOLD_ORDER,
    "batch": "1,16",
    "budget": "100",
}
"""The values of flags that are not given: of a tiny model they take two minutes at most."""
SHORT_FAMILIES = ("qwen3",)
_AS_GIVEN = ("tokens", "seed", "control", "load_format", "device", "leaves", "draft_model")
"""Flags that are fields of a `VerifySpec`."""


def add_verify(commands: argparse._SubParsersAction) -> None:
    """Add the `verify` command."""
    command = commands.add_parser(
        "verify", help="prove that no circumstance changes a bit", allow_abbrev=False
    )
    command.add_argument(
        "model",
        nargs="*",
        help="checkpoints, or shapes such as qwen3-8b for --load-format dummy; tiny ones if none",
    )
    command.add_argument(
        "--all",
        action="store_true",
        help="widen every flag that is not given to all that it can be, and without a model take "
        "one of each family: many minutes; without it the main circumstances at TP 1 and 2, of a "
        "tiny model within two minutes on two cores",
    )
    _add_matrix(command)
    command.add_argument("--seed", type=int, default=0, help="of the probes")
    command.add_argument(
        "--load-format", default="auto", choices=["auto", "dummy"], help="dummy: drawn weights"
    )
    command.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="where the model runs"
    )
    command.add_argument(
        "--worlds-per-gpu",
        type=int,
        default=1,
        help="worlds that may share a GPU, while it holds a copy of the model for each: more is "
        "faster, because a world that starts or compiles leaves its GPU idle",
    )
    command.add_argument(
        "--draft-model",
        metavar="DIR",
        help="the other model of the relation draft_model, with the same tokenizer; by default one "
        "with random weights",
    )
    command.add_argument("--output", type=results_file, help="results file (JSON) to append to")
    command.add_argument(
        "--control",
        action="store_true",
        help="use the stock all-reduce and products instead: this must report differences",
    )
    command.add_argument(
        "--approximate", action="store_true", help="refused: that mode promises no bit"
    )
    command.set_defaults(run=_verify)


def _add_matrix(command: argparse.ArgumentParser) -> None:
    """Add the flags of the matrix, without defaults: `fill_matrix` gives them later."""

    def add(name: str, text: str, kind: type = str) -> None:
        key = name.replace("-", "_")
        default, whole = SHORT[key], WHOLE[key]
        widened = "" if default == whole else f"; with --all {whole}"
        said = "" if default is None else f" (default {default}{widened})"
        command.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text + said)

    add("relations", relations_help())
    add("tp", "tensor-parallel sizes, a list")
    add("dtype", "dtypes, a list")
    add("fold-order", "fold orders, a list")
    add("leaves", "leaves of the fold, at most; 8 by default", int)
    add("launcher", launchers_help())
    add("transport", f"what carries sums between ranks, a list of {', '.join(TRANSPORTS)}")
    add(
        "nodes",
        "nodes that the ranks lie on, a list of numbers: the hosts of a Slurm cluster, else "
        "neighbours of this host as if they were on a host of their own (two-level fold)",
    )
    add("row-layers", "fold, gather, or both: fold,gather")
    add("batch", "requests in flight together, a list")
    add("budget", "tokens in a step (chunked prefill), a list")
    add("prompt-lengths", "tokens of the probes' prompts, a list")
    add("tokens", "tokens each probe generates", int)


def fill_matrix(options: argparse.Namespace) -> None:
    """Fill in every flag of the matrix that was not given: a flag narrows, --all widens."""
    for name, value in (WHOLE if options.all else SHORT).items():
        if not hasattr(options, name):
            setattr(options, name, value)


def _verify(options: argparse.Namespace) -> int:
    from tpdet.checkpoint.model_config import FAMILY_NAMES
    from tpdet.tools.verify.run import verify_all
    from tpdet.tools.verify.spec import VerifySpec
    from tpdet.tools.worlds.lists import parse_row_layers, parse_sizes

    if options.approximate:
        raise UsageError(
            "--approximate: approximate arithmetic is not deterministic, there is nothing to "
            "verify; --control shows what verification says of such arithmetic"
        )
    fill_matrix(options)
    dtypes, fold_orders = _engine_lists(options)
    spec = VerifySpec(
        model="",
        dtypes=dtypes,
        fold_orders=fold_orders,
        row_layers=parse_row_layers(options.row_layers, options.control),
        batches=parse_sizes(options.batch),
        budgets=parse_sizes(options.budget),
        prompt_lengths=parse_sizes(options.prompt_lengths),
        relations=parse_relations(options.relations),
        **{name: getattr(options, name) for name in _AS_GIVEN},
    )
    ways = Ways(
        parse_launchers(options.launcher),
        parse_transports(options.transport),
        parse_sizes(options.nodes),
    )
    check_counts(options, "worlds_per_gpu")
    tps = parse_sizes(options.tp)
    families = FAMILY_NAMES if options.all else SHORT_FAMILIES
    return verify_all(
        options.model, spec, tps, options.output, options.worlds_per_gpu, ways, families
    )


def _engine_lists(options: argparse.Namespace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dtypes and the fold orders; refused here, as `leaves` are, and not by every rank."""
    from tpdet.config import EngineConfig, validated

    found = []
    for name in ("dtype", "fold_order"):
        each = []
        for value in getattr(options, name).split(","):
            values = {"model": "", "leaves": options.leaves, name: value}
            config = validated(EngineConfig, values, lambda field: "--" + field.replace("_", "-"))
            each.append(getattr(config, name))
        found.append(tuple(dict.fromkeys(each)))
    dtypes, fold_orders = found
    return dtypes, fold_orders
