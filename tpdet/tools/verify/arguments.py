"""The flags of `tpdet verify`, and the specification they make; its code is imported later."""

import argparse

from tpdet.arguments.command_line import check_counts, html_file, results_file
from tpdet.arguments.flags import Flag, add_command, add_flags, choice, file, flag, switch
from tpdet.errors import UsageError
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, KV_CACHE_DTYPES
from tpdet.tools.verify.relations import parse_relations, relations_help
from tpdet.tools.worlds.ways import LAUNCHERS, TRANSPORTS, Ways, launchers_help

_MATRIX: dict[str, tuple[str | int | None, str]] = {
    "relations": ("all", relations_help()),
    "tp": ("1,2,4,8", "tensor-parallel sizes, a list"),
    "dtype": ("float32,bfloat16", "dtypes, a list"),
    "fold_order": ("sequential,pairs,tree", "fold orders, a list"),
    "leaves": (None, "leaves of the fold, at most; 8 by default"),
    "launcher": ("self", launchers_help()),
    "transport": (
        "auto", f"what carries sums between ranks, a list of {', '.join(TRANSPORTS)}"
    ),
    "nodes": (
        "1", "nodes that the ranks lie on, a list of numbers: the hosts of a Slurm cluster, else "
        "neighbours of this host as if they were on a host of their own (two-level fold)",
    ),
    "row_layers": ("fold", "fold, gather, or both: fold,gather"),
    "batch": ("1,4,16,64", "requests in flight together, a list"),
    "budget": ("16,100", "tokens in a step (chunked prefill), a list"),
    "prompt_lengths": ("5,300,37", "tokens of the probes' prompts, a list"),
    "tokens": (12, "tokens each probe generates"),
}  # fmt: skip
"""Flags of the matrix: what stands for all that they can be, and their texts. None has a default in
the parser: `fill_matrix` gives it later.
"""
WHOLE = {name: whole for name, (whole, _) in _MATRIX.items()}
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
_AS_GIVEN = ("tokens", "seed", "control", "load_format", "device", "leaves", "draft_model", "task",
             "kv_cache_dtype")  # fmt: skip
"""Flags that are fields of a `VerifySpec`."""


_MODELS = (
    flag("model",
         "checkpoints, or shapes such as qwen3-8b for --load-format dummy; tiny ones if none",
         nargs="*"),
    switch("--all",
           "widen every flag that is not given to all that it can be, and without a model take "
           "one of each family: many minutes; without it the main circumstances at TP 1 and 2, of "
           "a tiny model within two minutes on two cores"),
)  # fmt: skip
_FLAGS = (
    flag("--seed", "of the probes", type=int, default=0),
    choice("--load-format", "dummy: drawn weights", "auto", "dummy"),
    choice("--device", "where the model runs", "auto", "cpu", "cuda"),
    choice("--task", "what the model answers: of one that pools, pooled prompts are compared",
           "auto", "generate", "embed", "classify", "score", "reward"),
    choice("--kv-cache-dtype", "how pages hold keys and values", *KV_CACHE_DTYPES),
    flag("--worlds-per-gpu",
         "worlds that may share a GPU, while it holds a copy of the model for each: more is "
         "faster, because a world that starts or compiles leaves its GPU idle",
         type=int, default=1),
    flag("--draft-model",
         "the other model of the relation draft_model, with the same tokenizer; by default one "
         "with random weights", metavar="DIR"),
    flag("--output", "results file (JSON) to append to", type=results_file),
    flag("--html", "write a page for browsers: matrix, first differences, environment, times",
         type=html_file, metavar="FILE"),
    file("--from", "verify nothing, and make the page of --html from this file of --output",
         dest="results"),
    switch("--control",
           "use the stock all-reduce and products instead: this must report differences"),
    switch("--approximate", "refused: that mode promises no bit"),
)  # fmt: skip


def _matrix_flag(name: str) -> Flag:
    (whole, text), default = _MATRIX[name], SHORT[name]
    widened = "" if default == whole else f"; with --all {whole}"
    said = "" if default is None else f" (default {default}{widened})"
    kind = int if name in ("leaves", "tokens") else str
    names = f"--{name.replace('_', '-')}"
    return flag(names, text + said, type=kind, default=argparse.SUPPRESS)


def add_verify(commands: argparse._SubParsersAction) -> None:
    """Add the `verify` command."""
    command = add_command(
        commands,
        "verify",
        _verify,
        _MODELS,
        help="prove that no circumstance changes a bit",
        allow_abbrev=False,
    )
    add_flags(command, map(_matrix_flag, _MATRIX))
    add_flags(command, _FLAGS)


def fill_matrix(options: argparse.Namespace) -> None:
    """Fill in every flag of the matrix that was not given: a flag narrows, --all widens."""
    for name, value in (WHOLE if options.all else SHORT).items():
        if not hasattr(options, name):
            setattr(options, name, value)


def _verify(options: argparse.Namespace) -> int:
    if options.results is not None:
        return _page_only(options)
    from tpdet.checkpoint.model_config import FAMILY_NAMES
    from tpdet.tools.verify.run import ResultFiles, verify_all
    from tpdet.tools.verify.spec import VerifySpec
    from tpdet.tools.worlds.lists import parse_names, parse_row_layers, parse_sizes

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
        parse_names("launcher", options.launcher, LAUNCHERS),
        parse_names("transport", options.transport, TRANSPORTS),
        parse_sizes(options.nodes),
    )
    check_counts(options, "worlds_per_gpu")
    tps = parse_sizes(options.tp)
    families = FAMILY_NAMES if options.all else SHORT_FAMILIES
    files = ResultFiles(options.output, options.html)
    return verify_all(options.model, spec, tps, files, options.worlds_per_gpu, ways, families)


def _page_only(options: argparse.Namespace) -> int:
    """Make the page of a results file."""
    from tpdet.tools.verify.page import write_page
    from tpdet.tools.verify.results import read_runs

    if options.html is None or options.output is not None or options.model:
        raise UsageError("--from makes the page of a results file: give --html FILE, and no model")
    write_page(options.html, read_runs(options.results))
    return 0


def _engine_lists(options: argparse.Namespace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dtypes and the fold orders; refused here, as `leaves` are, and not by every rank."""
    from tpdet.config import EngineConfig, validated

    def checked(name: str) -> tuple[str, ...]:
        names = []
        for value in getattr(options, name).split(","):
            values = {"model": "", "leaves": options.leaves, name: value}
            config = validated(EngineConfig, values, lambda field: "--" + field.replace("_", "-"))
            names.append(getattr(config, name))
        return tuple(dict.fromkeys(names))

    return checked("dtype"), checked("fold_order")
