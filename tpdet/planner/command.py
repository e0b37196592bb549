"""`tpdet plan`: what a model needs and does on GPUs that need not be there."""

import argparse
import sys
from dataclasses import replace

import msgspec
from rich.console import Console
from rich.table import Table

from tpdet.errors import UsageError
from tpdet.planner.hardware import GIB, Network
from tpdet.planner.models import find_model
from tpdet.planner.plan import Choice, Plan, Wish, choose_size, plan_size
from tpdet.server.settings.settings import Settings, load_settings

_NO_ROOM = 71  # the exit code of memory that does not suffice


def plan_command(options: argparse.Namespace) -> int:
    """Print the plan, or draw it; 71 when memory does not hold the batch, or no size does.

    Raises UsageError, NotFoundError and CheckpointError as the model and the flags do.
    """
    wish = wish_of(options)
    if options.plot is not None:
        from tpdet.planner.plot import draw_plan

        draw_plan(wish, options.plot)
        return 0
    choice = choose_size(wish)
    tp = wish.tp or choice.tp
    plan = plan_size(wish, tp) if tp else None
    if options.json:
        found = {"plan": plan, "recommended": {"tp": choice.tp, "reason": choice.reason},
                 "sizes": choice.sizes}  # fmt: skip
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        print_plan(plan, choice)
    return 0 if plan is not None and plan.fits else _NO_ROOM


def wish_of(options: argparse.Namespace) -> Wish:
    """What the flags ask for; of what they leave out, what `--config` says. Raises UsageError."""
    settings = None
    if options.config is not None:
        named = [] if options.model is None else ["--model", options.model]
        settings = load_settings(["--config", str(options.config), *named], "tpdet plan", {})
    model = settings.engine.model if settings is not None else options.model
    if model is None:
        raise UsageError("no model is given: name one with --model, or a file with --config")
    wish = Wish(model, find_model(model), options.gpu.lower(), context=4096, batch=64)
    if settings is not None:
        wish = configured(wish, settings)
    flags = {
        "nodes": options.nodes, "tp": options.tp, "context": options.context,
        "batch": options.batch, "leaves": options.leaves, "fold_order": options.fold_order,
        "budget": options.budget, "gpus": options.gpus_per_node,
        "utilization": options.gpu_memory_utilization, "most_ms": options.max_step_ms,
    }  # fmt: skip
    wish = replace(wish, **{name: value for name, value in flags.items() if value is not None})
    network = Network(
        bytes=Network.bytes if options.network_gbps is None else 1e9 * options.network_gbps / 8,
        hop=Network.hop if options.network_us is None else 1e-6 * options.network_us,
    )
    return checked(replace(wish, network=network))


def configured(wish: Wish, settings: Settings) -> Wish:
    """A run's own sizes: every seat taken by a sequence of the longest length it serves."""
    engine, world = settings.engine, settings.world
    config = find_model(wish.model, engine.dtype)
    context = engine.max_model_len or config.max_position
    return replace(
        wish,
        config=config,
        context=context,
        batch=engine.seats,
        nodes=world.nodes,
        tp=world.tp,
        leaves=engine.leaves,
        fold_order=engine.fold_order,
        budget=engine.max_num_batched_tokens,
        utilization=engine.gpu_memory_utilization,
    )


def checked(wish: Wish) -> Wish:
    """The wish; raises UsageError for numbers that make no sense."""
    for name in ("nodes", "context", "batch", "budget"):
        if getattr(wish, name) < 1:
            raise UsageError(f"--{name} {getattr(wish, name)}: use 1 or more")
    for name in ("tp", "gpus"):
        value = getattr(wish, name)
        if value is not None and (value < 1 or value & (value - 1)):
            flag = {"tp": "--tp", "gpus": "--gpus-per-node"}[name]
            raise UsageError(f"{flag} {value}: use a power of two")
    if not 0 < wish.utilization <= 1 or wish.network.bytes <= 0 or wish.network.hop < 0:
        raise UsageError("--gpu-memory-utilization and the network's figures must be over 0")
    if wish.context > wish.config.max_position:
        raise UsageError(
            f"--context {wish.context} is over the model's {wish.config.max_position}: lower it"
        )
    return wish


LEGEND = (
    "TP: GPUs that share one copy of the model, a world; worlds: such copies side by side, each "
    "with requests of its own",
    "sequences: how many of the context's length one world's memory holds; a step gives each of "
    "the batch a token",
    "floor: the least that a step takes if these GPUs only moved its bytes or only computed, at "
    "their measured rates",
    "most of a step: products are matrix products, exchange is what ranks send each other, host "
    "is the CPU's work",
)
"""What the words of the table mean."""


def print_plan(plan: Plan | None, choice: Choice) -> None:
    """A table of the sizes, the size asked for in detail, what the words mean, and the advice."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(_sizes(choice))
    if plan is not None:
        for line in plan_lines(plan):
            console.print(line, highlight=False, soft_wrap=True)
    for line in LEGEND:
        console.print(line, highlight=False, soft_wrap=True, style="dim")
    advice = f"recommended: TP {choice.tp}" if choice.tp else "recommended: none"
    console.print(f"{advice}: {choice.reason}", highlight=False, soft_wrap=True)


def plan_lines(plan: Plan) -> list[str]:
    """One size in words."""
    memory = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.memory.items())
    parts = ", ".join(
        f"{name} {value:.2f}" for name, value in plan.decode_parts.items() if value >= 0.005
    )
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return [
        f"{plan.model}, TP {plan.tp} on {_count(plan.nodes, 'node')}, "
        f"{_count(plan.worlds, 'world')}, {plan.leaves} leaves, {plan.fold_order}: {verdict}",
        f"memory of a rank, GiB: {memory}",
        f"KV cache: {plan.kv_pages:,} pages, {plan.kv_tokens:,} tokens, {plan.kv_sequences:,} "
        f"sequences of {plan.context:,}",
        f"decode at batch {plan.batch}: {plan.decode_ms:.2f} ms a step "
        f"(floor {plan.floor_ms:.2f}), {plan.decode_tokens:,.0f} tokens/s of all worlds; "
        f"most of it: {plan.decode_limit}",
        f"  ms: {parts}",
        f"prefill: {plan.prefill_tokens:,.0f} tokens/s of all worlds; most of it: "
        f"{plan.prefill_limit}",
        *(f"note: {note}" for note in plan.notes),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _sizes(choice: Choice) -> Table:
    table = Table()
    for column in (
        "TP",
        "worlds",
        "fits",
        "sequences",
        "ms a step",
        "decode tokens/s",
        "prefill tokens/s",
        "most of a step",
    ):
        table.add_column(column, justify="left" if column == "most of a step" else "right")
    for size in choice.sizes:
        table.add_row(
            str(size.tp),
            str(size.worlds),
            "yes" if size.fits else "no",
            f"{size.kv_sequences:,}",
            f"{size.decode_ms:.2f}",
            f"{size.decode_tokens:,.0f}",
            f"{size.prefill_tokens:,.0f}",
            size.decode_limit,
        )
    return table
