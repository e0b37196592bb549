"""Reports the determinism matrix: as a table for people, as a results file for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from tpdet.tools.verify.compare import Relation
from tpdet.tools.worlds.ways import USUAL, LaunchWay

SHOWN_DIGITS = 10
"""Digits of a digest that are shown."""


@dataclass(frozen=True)
class MatrixRow:
    """One circumstance and way; a relation for each size, None where it did not run."""

    way: LaunchWay
    circumstance: str
    relations: tuple[Relation | None, ...]


@dataclass(frozen=True)
class MatrixGroup:
    """Rows that were compared with one reference, which other texts or answers do not share."""

    reference: str
    positions: int
    rows: tuple[MatrixRow, ...]


@dataclass(frozen=True)
class Matrix:
    """The relations of one dtype and mode: a row a circumstance, a column a size of `tps`.

    named: a way of starting the ranks was chosen, so the rows name theirs.
    """

    dtype: str
    mode: str
    tps: tuple[int, ...]
    named: bool
    groups: tuple[MatrixGroup, ...]


def matrices(relations: Sequence[Relation], tps: Sequence[int]) -> Iterator[Matrix]:
    """A matrix for each dtype and mode, in their order."""
    ways = list(dict.fromkeys(relation.way for relation in relations))
    by_mode: dict[tuple[str, str], list[Relation]] = {}
    for relation in relations:
        by_mode.setdefault((relation.dtype, relation.mode), []).append(relation)
    for (dtype, mode), of_mode in by_mode.items():
        groups: dict[str, list[Relation]] = {}
        for relation in of_mode:
            groups.setdefault(relation.reference, []).append(relation)
        yield Matrix(
            dtype,
            mode,
            (*tps,),
            ways != [USUAL],
            tuple(
                MatrixGroup(reference, group[0].positions, (*_rows(group, ways, tps),))
                for reference, group in groups.items()
            ),
        )


def _rows(
    group: Sequence[Relation], ways: Sequence[LaunchWay], tps: Sequence[int]
) -> Iterator[MatrixRow]:
    cells: dict[tuple[LaunchWay, str], dict[int, Relation]] = {}
    for relation in group:
        row = cells.setdefault((relation.way, relation.circumstance), {})
        row.setdefault(relation.tp, relation)
    for way, circumstance in sorted(cells, key=lambda name: ways.index(name[0])):
        of_row = cells[way, circumstance]
        yield MatrixRow(way, circumstance, tuple(of_row.get(tp) for tp in tps))


def print_matrix(model: str, relations: list[Relation], tps: list[int], console: Console) -> None:
    """Print a table for each dtype and mode; groups of rows stand together."""
    for matrix in matrices(relations, tps):
        title = f"{model} · {matrix.dtype} · {matrix.mode}"
        table = Table(title=title, caption=_caption(matrix.groups))
        if matrix.named:
            table.add_column("ranks", no_wrap=True)
        table.add_column("circumstance")
        for tp in matrix.tps:
            table.add_column(f"TP {tp}", justify="center")
        for group in matrix.groups:
            table.add_section()
            for row in group.rows:
                way = [str(row.way)] if matrix.named else []
                table.add_row(*way, row.circumstance, *map(_cell, row.relations))
        console.print(table)


def _caption(groups: Sequence[MatrixGroup]) -> str:
    """What the digests of each group of rows cover."""
    heads = [f"{one.reference[:SHOWN_DIGITS]}: {one.positions} positions" for one in groups]
    if len(heads) == 1:
        return f"equal digests, equal bits · reference {heads[0]}"
    listed = "; ".join(heads)
    return f"equal digests, equal bits · each group of rows has texts of its own: {listed}"


def _cell(relation: Relation | None) -> str:
    if relation is None:
        return "-"
    digest = relation.digest[:SHOWN_DIGITS]
    return f"[green]{digest}[/green]" if relation.equal else f"[bold red]{digest} ≠[/bold red]"


def result_rows(model: str, relations: list[Relation], control: bool) -> list[dict]:
    """The rows of a results file, one for each relation."""
    case = {"case": "verify", "model": model}
    of_control = {"control": True} if control else {}
    return [
        case
        | {name: value for name, value in msgspec.to_builtins(one).items() if value is not None}
        | of_control
        for one in relations
    ]


def sizes_without_difference(relations: Sequence[Relation]) -> list[int]:
    """Tensor-parallel sizes above 1, ascending, at which every relation was equal."""
    sizes = {relation.tp for relation in relations if relation.tp > 1}
    return sorted(sizes - {relation.tp for relation in relations if not relation.equal})
