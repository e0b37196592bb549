"""The engine in the default fold order, a line a tensor-parallel size: a Markdown table."""

from collections.abc import Sequence
from pathlib import Path

from scripts.tables.other_orders import other_orders
from tpdet.tools.measurement.results_file import Row, Run, in_default_order, newest_rows

NOTHING = "Not measured yet: the results hold no case of every size."
_CASES = ("decode", "prefill", "mixed")

Cell = tuple[str, int, int, str]  # case, batch, context, unit


def size_table(paths: Sequence[Path], model: str) -> list[str]:
    """Lines: sizes down, across those cases of a model that were measured at every size.

    A figure of another fold order than the default names it, and a note says what that changes.
    """
    found = [pair for path in paths for pair in in_default_order(newest_rows(path))]
    found = [(run, row) for run, row in found if row["model"] == model and row["case"] in _CASES]
    sizes: dict[int, dict[Cell, tuple[Run, Row]]] = {}
    for run, row in found:
        sizes.setdefault(row["tp"], {})[_cell(row)] = run, row
    shared = set.intersection(*(set(cells) for cells in sizes.values())) if sizes else set()
    if not shared:
        return [NOTHING]
    cells = sorted(shared, key=lambda cell: (_CASES.index(cell[0]), cell[2], cell[1]))
    lines = ["| TP | " + " | ".join(map(_title, cells)) + " | commits |"]
    lines.append("|" + "---|" * (2 + len(cells)))
    shown: list[tuple[int, str]] = []
    for tp, figures in sorted(sizes.items()):
        mine = [figures[cell] for cell in cells]
        shown += [(tp, row["mode"]) for _, row in mine]
        commits = ", ".join(dict.fromkeys(run["commit"] for run, _ in mine))
        lines.append(f"| {tp} | " + " | ".join(_text(row) for _, row in mine) + f" | {commits} |")
    note = other_orders(shown)
    return [*lines, "", note] if note else lines


def _cell(row: Row) -> Cell:
    return row["case"], row["batch"], row["context"], row["unit"]


def _title(cell: Cell) -> str:
    case, batch, context, unit = cell
    if case == "decode":
        return f"decode, batch {batch} [{unit}]"
    return f"{case}, {batch} of {context:,} [{unit}]"


def _text(row: Row) -> str:
    digits = 0 if row["unit"] == "tokens/s" else 2
    return f"{row['value']:,.{digits}f} `{row['mode']}`"
