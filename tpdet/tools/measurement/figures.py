"""Pictures by matplotlib, an extra: no display, and the same bytes of an SVG for the same data."""

import importlib.util
from pathlib import Path
from typing import Any

from tpdet.errors import UsageError

COLOURS = ("#1b6ca8", "#c8553d", "#3c8d53", "#8a5aa8", "#b8860b", "#555555", "#111111")


def require_matplotlib() -> None:
    """Raises UsageError naming the extra when matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("a plot needs matplotlib: pip install 'tpdet[plot]'")


def new_figure(width: float, height: float) -> Any:
    """A figure of these inches; no global state, so no display is looked for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, stem: Path) -> None:
    """As PNG and SVG, printing each path; an SVG of the same data has the same bytes."""
    from matplotlib import rc_context

    for suffix in ("png", "svg"):
        path = stem.with_name(f"{stem.name}.{suffix}")
        metadata = {"Date": None} if suffix == "svg" else {"Software": None}
        with rc_context({"svg.hashsalt": "tpdet"}):
            figure.savefig(path, dpi=150, metadata=metadata)
        print(path)
