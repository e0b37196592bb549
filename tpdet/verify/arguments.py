"""The flags of `tpdet verify`, and what they ask for; what runs it is imported when it runs."""

import argparse
from pathlib import Path

from tpdet.errors import UsageError
from tpdet.verify.relations import parse_relations, relations_help
from tpdet.verify.ways import TRANSPORTS, Ways, launchers_help, parse_launchers, parse_transports


def add_verify(commands: argparse._SubParsersAction) -> None:
    """Add the `verify` command."""
    command = commands.add_parser(
        "verify", help="prove that no circumstance changes a bit", allow_abbrev=False
    )
    command.add_argument("model", nargs="*", help="checkpoints; a tiny one of each family if none")
    command.add_argument("--relations", default="all", help=relations_help())
    command.add_argument("--tp", default="1,2,4,8", help="tensor-parallel sizes")
    command.add_argument("--dtype", default="float32,bfloat16", help="dtypes, a list")
    command.add_argument("--fold-order", default="sequential,pairs,tree", help="a list")
    command.add_argument("--leaves", type=int, help="of the fold, at most; 8 by default")
    command.add_argument("--launcher", default="self", help=launchers_help())
    command.add_argument(
        "--transport",
        default="auto",
        help=f"what carries sums between ranks, a list of {', '.join(TRANSPORTS)}",
    )
    command.add_argument(
        "--nodes",
        default="1",
        help="nodes that the ranks lie on, a list of numbers: the hosts of a Slurm cluster, else "
        "neighbours of this host as if they were on a host of their own (two-level fold)",
    )
    command.add_argument("--row-layers", default="fold", help="fold, gather, or both: fold,gather")
    command.add_argument("--batch", default="1,4,16,64", help="requests in flight together")
    command.add_argument("--budget", default="16,100", help="tokens in a step (chunked prefill)")
    command.add_argument("--prompt-lengths", default="5,300,37", help="of the probes, in tokens")
    command.add_argument("--tokens", type=int, default=12, help="tokens each probe generates")
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
        help="worlds that may share a GPU, each with a copy of the model: more is faster, because "
        "a world that starts or compiles leaves its GPU idle",
    )
    command.add_argument("--output", type=Path, help="results file (JSON) to append to")
    command.add_argument(
        "--control",
        action="store_true",
        help="use the stock all-reduce and products instead: this must report differences",
    )
    command.add_argument(
        "--approximate", action="store_true", help="refused: that mode promises no bit"
    )
    command.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    from tpdet.config import EngineConfig
    from tpdet.verify.run import parse_row_layers, parse_sizes, verify_all
    from tpdet.verify.spec import VerifySpec

    if options.approximate:
        raise UsageError(
            "--approximate: approximate arithmetic is not deterministic, there is nothing to "
            "verify; --control shows what verification says of such arithmetic"
        )
    spec = VerifySpec(
        model="",
        dtypes=tuple(options.dtype.split(",")),
        fold_orders=tuple(options.fold_order.split(",")),
        row_layers=parse_row_layers(options.row_layers, options.control),
        batches=parse_sizes(options.batch),
        budgets=parse_sizes(options.budget),
        prompt_lengths=parse_sizes(options.prompt_lengths),
        tokens=options.tokens,
        seed=options.seed,
        control=options.control,
        load_format=options.load_format,
        device=options.device,
        relations=parse_relations(options.relations),
        leaves=options.leaves,
    )
    EngineConfig.from_values(model="", leaves=options.leaves)  # refused here, not by every rank
    ways = Ways(
        parse_launchers(options.launcher),
        parse_transports(options.transport),
        parse_sizes(options.nodes),
    )
    if options.worlds_per_gpu < 1:
        raise UsageError(f"--worlds-per-gpu {options.worlds_per_gpu}: use 1 or more")
    tps = parse_sizes(options.tp)
    return verify_all(options.model, spec, tps, options.output, options.worlds_per_gpu, ways)
