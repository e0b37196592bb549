"""Draws the charts of `tpdet plan --plot`: scaling to many nodes, and the parts of a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tpdet.errors import ResourceError
from tpdet.tools.measurement.figures import COLOURS, new_figure, require_matplotlib, save_figure
from tpdet.tools.plan.plan import Plan, PlanRequest, plan_sizes

NODES = (1, 2, 4, 8, 16, 32, 64)


def draw_plan(request: PlanRequest, stem: Path) -> None:
    """Write stem.png and stem.svg. Raises UsageError without matplotlib, ResourceError when no
    size holds the batch."""
    require_matplotlib()
    every = plan_sizes(replace(request, nodes=NODES[-1]))
    if not any(plan.fits for plan in every):
        raise ResourceError(
            f"no size holds {request.batch} sequences of {request.context} tokens: lower --batch "
            "or --context, or raise --leaves"
        )
    figure = new_figure(11.0, 4.8)
    left, right = figure.subplots(1, 2)
    _draw_scaling(left, request, every)
    _draw_parts(right, every)
    figure.suptitle(
        f"{request.model} on {request.gpu.upper()}, {request.hardware.gpus} a node: planned "
        f"decode, batch {request.batch} a world, context {request.context:,}, {request.fold_order}"
    )
    stem.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, stem)


def _draw_scaling(axes: Any, request: PlanRequest, every: list[Plan]) -> None:
    """Draw tokens a second of all worlds over nodes, a line for each size that holds the batch."""
    for index, plan in enumerate(every):
        if not plan.fits:
            continue
        nodes = [count for count in NODES if count * request.hardware.gpus >= plan.tp]
        rate = plan.decode_tokens / plan.worlds
        axes.plot(
            nodes,
            [rate * count * request.hardware.gpus / plan.tp for count in nodes],
            marker="o",
            color=COLOURS[index % len(COLOURS)],
            label=f"TP {plan.tp}: {plan.decode_ms:.1f} ms",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(NODES, [str(count) for count in NODES])
    axes.set(xlabel="nodes", ylabel="tokens a second, all worlds", yscale="log")
    axes.set_title("Worlds of one size, side by side", fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8, title="size: a step")


def _draw_parts(axes: Any, every: list[Plan]) -> None:
    """Draw the parts of a step in ms, a bar for each size; hatched where it does not fit."""
    from matplotlib.patches import Patch

    names = [name for name in every[0].decode_parts if name != "host"]
    ticks = range(len(every))
    below, keys = [0.0] * len(every), []
    for index, name in enumerate(names):
        heights = [plan.decode_parts[name] for plan in every]
        colour = COLOURS[index % len(COLOURS)]
        bars = axes.bar(ticks, heights, bottom=below, color=colour)
        for bar, plan in zip(bars, every, strict=True):
            if not plan.fits:
                bar.set_hatch("//")
        below = [low + height for low, height in zip(below, heights, strict=True)]
        keys.append(Patch(color=colour, label=name))
    floors = [plan.floor_ms for plan in every]
    keys += axes.plot(ticks, floors, "_", color="white", markersize=18, label="floor")
    axes.set_xticks(list(ticks), [str(plan.tp) for plan in every])
    axes.set(
        facecolor="#e8e8e8",
        xlabel="tensor-parallel size (hatched: memory does not hold the batch)",
        ylabel="milliseconds a step",
    )
    axes.set_title("One world", fontsize=10)
    axes.legend(handles=keys, fontsize=8, facecolor="#e8e8e8")
