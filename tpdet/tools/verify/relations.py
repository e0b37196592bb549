"""The relations that `tpdet verify` can show, by their names in `--relations`."""

from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.tools.worlds.lists import refuse_unknown

STEPS = {
    "alone": "every probe by itself: the reference, always run",
    "batch": "the probes among random neighbours, one relation a size of --batch",
    "chunks": "prompts cut at a budget, one relation a size of --budget",
    "whole": "every prompt whole, all in one step",
    "preempted": "running sequences preempted and computed again every few steps",
    "prefixes": "pooled prompts whose first pages come from the prefix cache (models that pool)",
    "prefill": "decoded positions computed again as a prompt",
    "unscored": "prompts whose tokens are not scored, so that their last rows alone have logits",
    "drafts": "drafts of every kind, right and wrong, in steps of every kind",
    "ngrams": "texts that repeat themselves, with the default drafters and without",
    "draft_model": "a draft model: the model itself, and another one (--draft-model)",
}
"""Relations inside one world, between different steps."""

PROCESSES = {
    "fresh": "a second world of new processes",
    "cache": "a world of new processes that compiles every kernel again (GPUs)",
    "eager": "kernels launched one by one, without CUDA graphs (GPUs)",
    "gather": "the sums of ranks gathered by NCCL instead of peer memory (GPUs, above TP 1)",
    "experts": "experts placed the other way: whole on ranks, or cut over all (above TP 1)",
    "packed": "quantised weights that stay packed, beside the same ones as numbers (CPUs)",
}
"""Relations with other processes; they take longest, so they run for one fold order only."""

FRESH, CACHE, EAGER = "fresh process", "empty kernel cache", "without graphs"
GATHER = "transport gather"
PACKED = "packed weights"
PLACED = {"lanes": "whole experts on ranks", "columns": "experts cut over ranks"}
GROUPS = {"all": (*STEPS, *PROCESSES), "steps": tuple(STEPS), "processes": ("alone", *PROCESSES)}
_ONLY_ON = {"cuda": ("cache", "eager", "gather"), "cpu": ("packed",)}
_NOT_POOLED = ("prefill", "unscored", "drafts", "ngrams", "draft_model")


def parse_relations(text: str) -> tuple[str, ...]:
    """Relations of "all", "steps", "processes" or of names such as "batch,fresh".

    They come in the order of the tables, and always include "alone", the reference. Raises
    UsageError for an unknown name.
    """
    names = text.split(",")
    refuse_unknown("relation", names, (*GROUPS, *GROUPS["all"]))
    chosen = {"alone"}.union(*(GROUPS.get(name, (name,)) for name in names))
    return tuple(name for name in GROUPS["all"] if name in chosen)


def relations_help() -> str:
    """The sentence of `--help` on `--relations`."""
    texts = "; ".join(f"{name}: {what}" for name, what in (STEPS | PROCESSES).items())
    return (
        "all, steps (the first eleven), processes (the last six), or a list of names. "
        f"{texts}. draft_model and the last six run for one fold order: {DEFAULT_FOLD_ORDER}, if "
        "it is among those asked for"
    )


def that_apply(relations: tuple[str, ...], device: str, control: bool) -> tuple[str, ...]:
    """The relations that apply to "cpu" or "cuda"; the control runs only those of steps."""
    elsewhere = [name for other, names in _ONLY_ON.items() if other != device for name in names]
    kept = [name for name in relations if name not in elsewhere]
    return tuple(name for name in kept if name in STEPS or not control)


def that_apply_to(
    relations: tuple[str, ...], row: str | None, quantised: bool = False, hybrid: bool = False
) -> tuple[str, ...]:
    """Those that apply to a model which pools this row of a prompt; None: it generates.

    No text follows a pooled prompt, and only last rows are pooled behind pages of the cache.
    quantised: whether its weights can stay packed. hybrid: whether it has linear attention, with
    which no model drafts.
    """
    left_out = _NOT_POOLED if row is not None else ()
    if not quantised:
        left_out = (*left_out, "packed")
    if hybrid:
        left_out = (*left_out, "draft_model")
    if row != "last":
        left_out = (*left_out, "prefixes")
    return tuple(name for name in relations if name not in left_out)


def order_of_processes(modes: tuple[str, ...]) -> str:
    """The mode (a fold order, or "gather") for the relations that load a model anew."""
    return DEFAULT_FOLD_ORDER if DEFAULT_FOLD_ORDER in modes else modes[0]
