"""The command `tpdet plan`: reads its flags and prints the plan."""

import argparse
import sys
from dataclasses import replace

import msgspec
from rich.table import Table

from tpdet.arguments.command_line import check_counts
from tpdet.checkpoint.model_config.fit import check_widths
from tpdet.config import EngineConfig
from tpdet.errors import UsageError
from tpdet.runner.start.step_tokens import MOST_TOKENS
from tpdet.server.settings.settings import Settings, load_settings
from tpdet.tools.measurement.rows import make_table, wide_console
from tpdet.tools.plan.draft import DraftPlan, draft_request
from tpdet.tools.plan.hardware import GIB, Network
from tpdet.tools.plan.plan import Plan, PlanRequest, RecommendedSize, choose_size, plan_size
from tpdet.tools.worlds.shapes import find_model

_OF_FLAGS = (
    "nodes", "gpus", "tp", "context", "batch", "budget", "leaves", "fold_order", "utilization",
    "most_ms", "packed", "kv_cache_dtype",
)  # fmt: skip
"""Fields of a `PlanRequest` that flags set."""
_NO_ROOM = 71  # the exit code when memory is short


def plan_command(options: argparse.Namespace) -> int:
    """Print or plot the plan; the exit code is 71 when the batch does not fit into memory.

    Raises UsageError for the flags, NotFoundError and CheckpointError for the model.
    """
    request = request_of(options)
    if options.plot is not None:
        from tpdet.tools.plan.plot import draw_plan

        draw_plan(request, options.plot)
        return 0
    choice = choose_size(request)
    tp = request.tp or choice.tp
    plan = plan_size(request, tp) if tp else None
    if options.json:
        shown = {"plan": plan, "recommended": {"tp": choice.tp, "reason": choice.reason},
                 "sizes": choice.sizes}  # fmt: skip
        sys.stdout.write(msgspec.json.encode(shown).decode() + "\n")
    else:
        print_plan(plan, choice)
    return 0 if plan is not None and plan.fits else _NO_ROOM


def request_of(options: argparse.Namespace) -> PlanRequest:
    """The request of the flags; values they do not give come from `--config`. Raises UsageError."""
    settings = None
    if options.config is not None:
        named = [] if options.model is None else ["--model", options.model]
        settings = load_settings(["--config", str(options.config), *named], "tpdet plan", {})
    model = settings.engine.model if settings is not None else options.model
    if model is None:
        raise UsageError("no model is given: name one with --model, or a file with --config")
    request = PlanRequest(model, find_model(model), options.gpu.lower(), context=4096, batch=64)
    if settings is not None:
        request = configured(request, settings)
    flags = {name: getattr(options, name) for name in _OF_FLAGS}
    request = replace(
        request, **{name: value for name, value in flags.items() if value is not None}
    )
    network = Network(
        bytes=Network.bytes if options.gbps is None else 1e9 * options.gbps / 8,
        hop=Network.hop if options.hop_us is None else 1e-6 * options.hop_us,
    )
    request = checked(replace(request, network=network))
    return with_draft_model(request, settings, options)


def with_draft_model(
    request: PlanRequest, settings: Settings | None, options: argparse.Namespace
) -> PlanRequest:
    """The request with the draft model that is named, if one is. Raises as `draft_request`."""
    engine = EngineConfig.from_values(model=request.model) if settings is None else settings.engine
    name = options.draft_model or engine.draft_model
    if name is None:
        return request
    draft = draft_request(
        name,
        request.model,
        request.config,
        dtype=engine.dtype,
        tokenizer=engine.tokenizer,
        budget=options.budget or engine.max_num_batched_tokens,
        pages=engine.kv_pages,
    )
    return replace(request, draft=draft)


def configured(request: PlanRequest, settings: Settings) -> PlanRequest:
    """The request with a run's sizes: its largest batch, of sequences of its longest context."""
    engine, world = settings.engine, settings.world
    config = find_model(request.model, engine.dtype)
    context = engine.max_model_len or config.max_position
    return replace(
        request,
        config=config,
        context=context,
        batch=engine.max_running,
        nodes=world.nodes,
        tp=world.tp,
        leaves=engine.leaves,
        fold_order=engine.fold_order,
        kv_cache_dtype=engine.kv_cache_dtype,
        budget=engine.max_num_batched_tokens or MOST_TOKENS,
        utilization=engine.gpu_memory_utilization,
    )


def checked(request: PlanRequest) -> PlanRequest:
    """`request` itself. Raises UsageError for numbers that make no sense."""
    check_counts(request, "nodes", "context", "batch", "budget")
    for name in ("tp", "gpus"):
        value = getattr(request, name)
        if value is not None and (value < 1 or value & (value - 1)):
            flag = {"tp": "--tp", "gpus": "--gpus-per-node"}[name]
            raise UsageError(f"{flag} {value}: use a power of two")
    if not 0 < request.utilization <= 1 or request.network.bytes <= 0 or request.network.hop < 0:
        raise UsageError("--gpu-memory-utilization and the network's figures must be over 0")
    longest = request.config.max_position
    if request.context > longest:
        raise UsageError(f"--context {request.context} is over the model's {longest}: lower it")
    check_widths(request.config, "cuda")
    return request


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
"""Explains the words of the table."""


def print_plan(plan: Plan | None, choice: RecommendedSize) -> None:
    """Print a table of all sizes, one size in detail, the legend, and the recommendation."""
    console = wide_console(120)
    console.print(_sizes(choice))
    if plan is not None:
        for line in plan_lines(plan):
            console.print(line, highlight=False, soft_wrap=True)
    for line in LEGEND:
        console.print(line, highlight=False, soft_wrap=True, style="dim")
    advice = f"recommended: TP {choice.tp}" if choice.tp else "recommended: none"
    console.print(f"{advice}: {choice.reason}", highlight=False, soft_wrap=True)


def plan_lines(plan: Plan) -> list[str]:
    """The lines that describe one size."""
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
        *([] if plan.draft is None else [draft_line(plan.draft, plan)]),
        f"decode at batch {plan.batch}: {plan.decode_ms:.2f} ms a step "
        f"(floor {plan.floor_ms:.2f}), {plan.decode_tokens:,.0f} tokens/s of all worlds; "
        f"most of it: {plan.decode_limit}",
        f"  ms: {parts}",
        f"prefill: {plan.prefill_tokens:,.0f} tokens/s of all worlds; most of it: "
        f"{plan.prefill_limit}",
        *(f"note: {note}" for note in plan.notes),
    ]


def draft_line(draft: DraftPlan, plan: Plan) -> str:
    """The line that describes a draft model."""
    memory = ", ".join(f"{name} {size / GIB:.1f}" for name, size in draft.memory.items())
    return (
        f"draft model {draft.model} on rank 0, GiB: {memory} ({draft.kv_tokens:,} tokens, "
        f"{draft.kv_sequences:,} sequences); the KV cache has {plan.kv_pages:,} of "
        f"{draft.pages_without:,} pages beside it; a step of it takes {draft.step_ms:.2f} ms"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


_COLUMNS = (
    "TP", "worlds", "fits", "sequences", "ms a step", "decode tokens/s", "prefill tokens/s",
    "most of a step",
)  # fmt: skip


def _sizes(choice: RecommendedSize) -> Table:
    rows = [
        (
            str(size.tp),
            str(size.worlds),
            "yes" if size.fits else "no",
            f"{size.kv_sequences:,}",
            f"{size.decode_ms:.2f}",
            f"{size.decode_tokens:,.0f}",
            f"{size.prefill_tokens:,.0f}",
            size.decode_limit,
        )
        for size in choice.sizes
    ]
    return make_table(_COLUMNS, rows, left=("most of a step",))
