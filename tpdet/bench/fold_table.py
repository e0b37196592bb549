"""The fold orders end to end, beside row layers without a fold: a Markdown table of results."""

import json
from pathlib import Path
from typing import Any

from tpdet.kernels.order import FOLD_ORDERS

MODES = (*FOLD_ORDERS, "gather")
"""What is compared; a mode that names a transport is another experiment."""

NOTHING = "Not measured yet: no commit's results hold two of these modes."
_CASES = ("decode", "prefill", "mixed")

Cell = tuple[str, int | None, int | None, str]  # case, batch, context, unit


def fold_table(path: Path) -> list[str]:
    """Lines of the table of a latency file: modes and sizes down, cases across, the best in bold.

    Only runs of one commit are compared: of the newest that holds two modes or more.
    """
    runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for commit in dict.fromkeys(run["commit"] for run in reversed(runs)):
        mine = [run for run in runs if run["commit"] == commit]
        rows = [row for run in mine for row in run["rows"] if _compared(row)]
        if len({row["mode"] for row in rows}) > 1:
            return [_stamp(mine[-1]), "", *_lines(rows)]
    return [NOTHING]


def _compared(row: dict[str, Any]) -> bool:
    return row["case"] in _CASES and row.get("mode") in MODES


def _stamp(run: dict[str, Any]) -> str:
    """What the figures have in common."""
    return (
        f"`tpdet bench` on {run['gpu']}, torch {run['torch']}, {run['date']}, {run['commit']}. "
        "Bold: the best of a size."
    )


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    values: dict[tuple[str, int, str], dict[Cell, float]] = {}
    for row in rows:  # a newer figure replaces an older one
        cell = row["case"], row.get("batch"), row.get("context"), row["unit"]
        values.setdefault((row["model"], row["tp"], row["mode"]), {})[cell] = row["value"]
    order = {name: index for index, name in enumerate(_CASES)}
    cells = sorted(
        {cell for found in values.values() for cell in found},
        key=lambda cell: (order[cell[0]], cell[2] or 0, cell[1] or 0),
    )
    lines = ["| model | TP | mode | " + " | ".join(map(_title, cells)) + " |"]
    lines.append("|" + "---|" * (3 + len(cells)))
    for model, tp, mode in sorted(values, key=lambda key: (key[0], key[1], MODES.index(key[2]))):
        rivals = [found for (name, size, _), found in values.items() if (name, size) == (model, tp)]
        texts = [_text(values[model, tp, mode], cell, rivals) for cell in cells]
        lines.append(f"| {model} | {tp} | {mode} | " + " | ".join(texts) + " |")
    return lines


def _title(cell: Cell) -> str:
    case, batch, context, unit = cell
    where = ", ".join(
        text for text, value in ((f"batch {batch}", batch), (f"context {context}", context))
        if value is not None
    )  # fmt: skip
    return f"{case}{where and f', {where}'} [{unit}]"


def _text(found: dict[Cell, float], cell: Cell, rivals: list[dict[Cell, float]]) -> str:
    if cell not in found:
        return ""
    each = [rival[cell] for rival in rivals if cell in rival]
    best = max(each) if cell[3].endswith("/s") else min(each)
    text = f"{found[cell]:,.2f}"
    return f"**{text}**" if found[cell] == best and len(each) > 1 else text
