"""Reports the determinism matrix: as a table for people, as a results file for programs."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tpdet.tools.verify.compare import Relation
from tpdet.tools.worlds.ways import USUAL, LaunchWay

_SHOWN = 10
_COLUMNS = ("dtype", "mode", "tp", "equal", "digest", "reference", "positions")
"""Fields of a relation that its row has under their names; those of its way come too."""


def print_matrix(model: str, relations: list[Relation], tps: list[int], console: Console) -> None:
    """Print a table for each dtype and mode: a row a circumstance, a column a tensor-parallel size.

    Circumstances that were compared with one reference stand together: other texts, or answers
    alone, have digests of their own. There is a column for the way of starting the ranks if one was
    chosen.
    """
    ways = list(dict.fromkeys(relation.way for relation in relations))
    named = ways != [USUAL]
    for dtype, mode in dict.fromkeys((r.dtype, r.mode) for r in relations):
        mine = [r for r in relations if (r.dtype, r.mode) == (dtype, mode)]
        positions: dict[str, int] = {}
        for relation in mine:
            positions.setdefault(relation.reference, relation.positions)
        table = Table(title=f"{model} · {dtype} · {mode}", caption=_caption(positions))
        if named:
            table.add_column("ranks", no_wrap=True)
        table.add_column("circumstance")
        for tp in tps:
            table.add_column(f"TP {tp}", justify="center")
        for reference in positions:
            table.add_section()
            group = [r for r in mine if r.reference == reference]
            for way, name in sorted(
                {(r.way, r.circumstance): None for r in group}, key=lambda row: ways.index(row[0])
            ):
                cells = [_cell(group, way, name, tp) for tp in tps]
                table.add_row(*([str(way)] if named else []), name, *cells)
        console.print(table)


def _caption(positions: dict[str, int]) -> str:
    """What the digests of each group of rows cover."""
    groups = [f"{name[:_SHOWN]}: {count} positions" for name, count in positions.items()]
    if len(groups) == 1:
        return f"equal digests, equal bits · reference {groups[0]}"
    heads = "; ".join(groups)
    return f"equal digests, equal bits · each group of rows has texts of its own: {heads}"


def _cell(relations: list[Relation], way: LaunchWay, circumstance: str, tp: int) -> str:
    for relation in relations:
        if (relation.way, relation.circumstance, relation.tp) == (way, circumstance, tp):
            return (
                f"[green]{relation.digest[:_SHOWN]}[/green]"
                if relation.equal
                else f"[bold red]{relation.digest[:_SHOWN]} ≠[/bold red]"
            )
    return "-"


def result_rows(model: str, relations: list[Relation], control: bool) -> list[dict]:
    """The rows of a results file, one for each relation."""
    rows = []
    for relation in relations:
        row: dict[str, Any] = {"case": "verify", "model": model}
        row["relation"] = relation.circumstance
        row |= {name: getattr(relation, name) for name in _COLUMNS} | asdict(relation.way)
        if relation.difference is not None:
            row["difference"] = relation.difference
        if control:
            row["control"] = True
        rows.append(row)
    return rows
