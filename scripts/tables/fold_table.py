"""The fold orders end to end, beside row layers without a fold: a Markdown table of results."""

import json
from pathlib import Path

from scripts.tables.other_orders import other_orders
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS
from tpdet.tools.measurement.results_file import Row

MODES = (*FOLD_ORDERS, "gather")
"""What is compared; a mode that names a transport is another experiment."""

NOTHING = "Not measured yet: no commit's results hold two of these modes."
_CASES = ("decode", "prefill", "mixed")

Cell = tuple[str, int | None, int | None, str]  # case, batch, context, unit
Size = tuple[str, int]  # model, TP


def fold_table(path: Path) -> list[str]:
    """Lines of the table of a latency file: modes and sizes down, cases across, the best in bold.

    Only runs of one commit are compared: those of a model at one size are of the newest commit that
    holds two modes or more of it. Sizes of several commits are said to be no comparison.
    """
    runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows, stamps = {}, {}
    for run in reversed(runs):
        for size in dict.fromkeys(_size(row) for row in run["rows"] if _compared(row)):
            mine = _rows_of(runs, run["commit"], size)
            if size not in rows and len({row["mode"] for row in mine}) > 1:
                rows[size], stamps[size] = mine, run
    if not rows:
        return [NOTHING]
    commits = {size: run["commit"] for size, run in stamps.items()}
    found = [row for size in sorted(rows) for row in rows[size]]
    lines = ["Bold: the best of a size.", "", *_lines(found, commits), "", *_notes(stamps)]
    lacking = other_orders(
        (tp, row["mode"])
        for (_, tp), mine in rows.items()
        for row in mine
        if row["mode"] in FOLD_ORDERS and not any(r["mode"] == DEFAULT_FOLD_ORDER for r in mine)
    )
    return [*lines, "", lacking] if lacking else lines


def _size(row: Row) -> Size:
    return row["model"], row["tp"]


def _rows_of(runs: list[Row], commit: str, size: Size) -> list[Row]:
    mine = [row for run in runs if run["commit"] == commit for row in run["rows"]]
    return [row for row in mine if _compared(row) and _size(row) == size]


def _compared(row: Row) -> bool:
    return row["case"] in _CASES and row.get("mode") in MODES


def _notes(stamps: dict[Size, Row]) -> list[str]:
    """Where and when the figures of each commit were measured, and what may not be compared."""
    runs = {run["commit"]: run for run in stamps.values()}
    lines = []
    for commit, run in sorted(runs.items(), key=lambda item: min(_sizes(stamps, item[0]))):
        sizes = ", ".join(str(tp) for tp in _sizes(stamps, commit))
        where = f"{run['gpu']}, torch {run['torch']}, {run['date']}, {commit}"
        lines.append(f"- TP {sizes}: `tpdet bench` on {where}.")
    if len(runs) > 1:
        lines += ["", "Sizes of different commits were timed at different times and on machines "
                  "that need not be one: compare the rows of one size."]  # fmt: skip
    return lines


def _sizes(stamps: dict[Size, Row], commit: str) -> list[int]:
    return sorted({tp for (_, tp), run in stamps.items() if run["commit"] == commit})


def _lines(rows: list[Row], commits: dict[Size, str]) -> list[str]:
    values: dict[tuple[str, int, str], dict[Cell, float]] = {}
    for row in rows:  # a newer figure replaces an older one
        cell = row["case"], row.get("batch"), row.get("context"), row["unit"]
        values.setdefault((row["model"], row["tp"], row["mode"]), {})[cell] = row["value"]
    order = {name: index for index, name in enumerate(_CASES)}
    cells = sorted(
        {cell for found in values.values() for cell in found},
        key=lambda cell: (order[cell[0]], cell[2] or 0, cell[1] or 0),
    )
    lines = ["| model | TP | mode | " + " | ".join(map(_title, cells)) + " | commit |"]
    lines.append("|" + "---|" * (4 + len(cells)))
    for model, tp, mode in sorted(values, key=lambda key: (key[0], key[1], MODES.index(key[2]))):
        rivals = [found for (name, size, _), found in values.items() if (name, size) == (model, tp)]
        texts = [_text(values[model, tp, mode], cell, rivals) for cell in cells]
        texts.append(commits[model, tp])
        lines.append(f"| {model} | {tp} | {mode} | " + " | ".join(texts) + " |")
    return lines


def _title(cell: Cell) -> str:
    case, batch, context, unit = cell
    where = ", ".join(
        text
        for text, value in ((f"batch {batch}", batch), (f"context {context}", context))
        if value is not None
    )
    return f"{case}{where and f', {where}'} [{unit}]"


def _text(found: dict[Cell, float], cell: Cell, rivals: list[dict[Cell, float]]) -> str:
    if cell not in found:
        return ""
    each = [rival[cell] for rival in rivals if cell in rival]
    best = max(each) if cell[3].endswith("/s") else min(each)
    text = f"{found[cell]:,.2f}"
    return f"**{text}**" if found[cell] == best and len(each) > 1 else text
