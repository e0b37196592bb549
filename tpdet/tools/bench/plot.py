"""`tpdet bench plot`: plots of results files (PNG and SVG), made by matplotlib."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpdet.config import APPROXIMATE
from tpdet.errors import NotFoundError, UsageError
from tpdet.tools.bench.plot_data import (
    Curve,
    DeterminismCost,
    Growth,
    Point,
    by_context,
    costs,
    curves,
    load_name,
    peer_rows,
    points,
)
from tpdet.tools.measurement.figures import COLOURS, new_figure, require_matplotlib, save_figure
from tpdet.tools.measurement.floor import gpu_rates
from tpdet.tools.measurement.results_file import Row, Run, all_rows, newest_rows, short_name

_MARKERS = "osD^vP*X"
_PEER_LOADS = ("LLM decode", "LLM prefill", "LLM mixed", "HTTP output")


def plot_command(options: argparse.Namespace) -> int:
    """Plot the results of one GPU; prints the names of the files."""
    require_matplotlib()
    runs = results_of(options.results, options.gpu)
    if not runs:
        raise NotFoundError(f"{options.results} holds no results of a GPU: see tpdet bench --help")
    gpu = runs[0][0]["gpu"]
    options.output.mkdir(parents=True, exist_ok=True)
    suffix = short_name(gpu)
    models: dict[str, list[Curve]] = {}
    for curve in curves(runs):
        models.setdefault(curve.model, []).append(curve)
    for model, drawn in models.items():
        save_figure(_draw_latency(gpu, model, drawn), options.output / f"latency-{model}.{suffix}")
    for model, growth in by_context(runs).items():
        save_figure(_draw_growth(gpu, model, growth), options.output / f"context-{model}.{suffix}")
    for model, both in costs(results_of(options.results, suffix, all_rows)).items():
        save_figure(_draw_cost(gpu, model, both), options.output / f"cost-{model}.{suffix}")
    beside = options.results / f"peer.{suffix}.json"
    if beside.exists():
        for model in models:
            rows = [row for row in peer_rows(beside, model) if row["case"] in _PEER_LOADS]
            if rows:
                save_figure(_draw_peer(gpu, model, rows), options.output / f"peer-{model}.{suffix}")
    measured = points(runs)
    if measured:
        save_figure(_draw_roofline(gpu, measured), options.output / f"roofline.{suffix}")
    return 0


def results_of(
    folder: Path, gpu: str | None, read: Callable[[Path], list[tuple[Run, list[Row]]]] = newest_rows
) -> list[tuple[Run, list[Row]]]:
    """Rows that `read` finds in the files of one GPU: the named one, else that with most rows.

    Raises NotFoundError when there is no such folder, UsageError for a file that is no results.
    """
    if not folder.is_dir():
        raise NotFoundError(f"{folder} is no directory: name one of results files")
    by_gpu: dict[str, list[tuple[Run, list[Row]]]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            runs = read(path)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no results file: {error}") from error
        for run, rows in runs:
            name = run.get("gpu") or "cpu"
            timed = [row for row in rows if "value" in row]
            if timed and name != "cpu" and gpu in (None, short_name(name)):
                by_gpu.setdefault(name, []).append((run, timed))
    if not by_gpu:
        return []
    return max(by_gpu.values(), key=lambda runs: sum(len(rows) for _, rows in runs))


def _new_figure(title: str, across: str, up: str) -> tuple[Any, Any]:
    """A figure and its axes, which are logarithmic."""
    figure = new_figure(7.5, 5.0)
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=across, ylabel=up, xscale="log", yscale="log")
    axes.grid(True, which="both", alpha=0.25)
    return figure, axes


def _draw_latency(gpu: str, model: str, drawn: list[Curve]) -> Any:
    """Tokens a second over milliseconds a step, a point a batch."""
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = _new_figure(
        f"{model}, decode on {gpu}: throughput against latency",
        "milliseconds a step (what each reader waits for a token)",
        "tokens a second, all readers",
    )
    sizes = sorted({curve.tp for curve in drawn})
    modes = sorted({curve.mode for curve in drawn}, key=lambda mode: (mode == APPROXIMATE, mode))
    for curve in drawn:
        colour = COLOURS[sizes.index(curve.tp) % len(COLOURS)]
        style = ("-", "--", ":", "-.")[modes.index(curve.mode) % 4]
        axes.plot(
            [ms for _, ms in curve.steps],
            [1e3 * batch / ms for batch, ms in curve.steps],
            style,
            marker="o",
            color=colour,
            label=curve.label,
        )
        for batch, ms in curve.steps:
            axes.annotate(
                str(batch),
                (ms, 1e3 * batch / ms),
                textcoords="offset points",
                xytext=(5, -10),
                fontsize=7,
                color=colour,
            )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(StrMethodFormatter("{x:,g}"))
    axes.legend(fontsize=8)
    return figure


def _draw_growth(gpu: str, model: str, lines: list[Growth]) -> Any:
    """Milliseconds a step over the context, a line a size and batch."""
    figure, axes = _new_figure(
        f"{model}, decode on {gpu}: cost of context", "tokens of context", "milliseconds a step"
    )
    sizes = sorted({growth.tp for growth in lines})
    batches = sorted({growth.batch for growth in lines})
    for growth in lines:
        axes.plot(
            [context for context, _ in growth.steps],
            [ms for _, ms in growth.steps],
            marker=_MARKERS[batches.index(growth.batch) % len(_MARKERS)],
            color=COLOURS[sizes.index(growth.tp) % len(COLOURS)],
            label=f"TP {growth.tp}, batch {growth.batch}, {growth.mode}",
        )
    axes.legend(fontsize=7)
    return figure


def _draw_cost(gpu: str, model: str, both: list[DeterminismCost]) -> Any:
    """Per cent of time that determinism adds, a group of bars a case, a bar a size."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = _new_figure(
        f"{model} on {gpu}: cost of determinism", "", "time over --approximate, same engine"
    )
    axes.set(xscale="linear", yscale="linear")
    names = list(dict.fromkeys(name for cost in both for name, _ in cost.cases))
    width = 0.8 / len(both)
    for index, cost in enumerate(both):
        bars = axes.bar(
            [names.index(name) - 0.4 + (index + 0.5) * width for name, _ in cost.cases],
            [ratio - 1 for _, ratio in cost.cases],
            width,
            color=COLOURS[index % len(COLOURS)],
            label=f"TP {cost.tp}, {cost.mode}",
        )
        axes.bar_label(bars, [f"{100 * (ratio - 1):+.0f} %" for _, ratio in cost.cases], fontsize=7)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(fontsize=8)
    return figure


def _draw_peer(gpu: str, model: str, rows: list[Row]) -> Any:
    """Our speed over another engine's, a group of bars a load, a bar a size."""
    from matplotlib.patches import Rectangle

    (peer,) = {row["peer"] for row in rows}
    names = list(dict.fromkeys(load_name(row) for row in rows))
    sizes = sorted({row["tp"] for row in rows})
    figure = new_figure(9.0, 4.2)
    axes = figure.add_subplot()
    width = 0.27
    for index, name in enumerate(names):
        of_load = sorted((row for row in rows if load_name(row) == name), key=lambda row: row["tp"])
        for turn, row in enumerate(of_load):
            speed = 1 / row["ratio"]
            bar = axes.bar(
                index + (turn - (len(of_load) - 1) / 2) * width,
                speed,
                width,
                color=COLOURS[sizes.index(row["tp"])],
            )
            axes.bar_label(bar, [f"{speed:.2f}"], fontsize=6.5, padding=1)
    line = axes.axhline(1.0, color="black", linewidth=1.0)
    axes.set_ylim(0.0, max(1 / row["ratio"] for row in rows) * 1.12)
    axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
    axes.set(
        title=f"tpdet, bitwise deterministic, beside {peer}: {model} in bf16 on {gpu}",
        ylabel=f"speed over {peer}'s: higher is better",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        [*(Rectangle((0, 0), 0, 0, color=COLOURS[n]) for n in range(len(sizes))), line],
        [*(f"TP {tp}" for tp in sizes), peer],
        fontsize=8,
        ncols=len(sizes) + 1,
        loc="upper right",
        frameon=False,
    )
    return figure


def _draw_roofline(gpu: str, measured: list[Point]) -> Any:
    """Operations a second over operations a byte, under the GPU's bandwidth and peak."""
    figure, axes = _new_figure(
        f"Roofline on one {gpu}", "bf16 operations a byte", "operations a second"
    )
    rates = gpu_rates(gpu)
    if rates is not None:
        low = min(point.intensity for point in measured) / 2
        high = max(max(point.intensity for point in measured), rates.flops / rates.bytes) * 2
        ridge = rates.flops / rates.bytes
        axes.plot(
            [low, ridge, high],
            [low * rates.bytes, rates.flops, rates.flops],
            color="black",
            label=f"{rates.bytes / 1e12:g} TB/s, {rates.flops / 1e12:g} TFLOP/s",
        )
    for index, group in enumerate(dict.fromkeys(point.group for point in measured)):
        members = [point for point in measured if point.group == group]
        axes.scatter(
            [point.intensity for point in members],
            [point.speed for point in members],
            s=18,
            color=COLOURS[index % len(COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            label=group,
            alpha=0.8,
            zorder=3,
        )
    axes.legend(fontsize=8)
    return figure
