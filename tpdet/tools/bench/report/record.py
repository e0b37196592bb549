"""Output of a benchmark: a table, a run in a results file, one JSON line on stdout.

The last line of stdout is the run as the results file holds it, if `--json` is given, or stdout is
no terminal and `--no-json` is not.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tpdet.launch.host.standard_streams import print_utf8
from tpdet.tools.verify.report import append_record, run_record
from tpdet.tools.worlds.spec import Machine


class BenchRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure. `ratio` is a time: ours over the peer's, over the floor's where none is named.

    For rates (unit a second) `floor` is the highest rate there can be, and `ratio` floor / value.
    `budget`: tokens of a step of the engine, at most. `flops` and `bytes` are what the case must
    compute and move on one GPU.
    """

    case: str
    value: float
    unit: str
    model: str | None = None
    dtype: str | None = None
    mode: str | None = None
    tp: int | None = None
    batch: int | None = None
    context: int | None = None
    budget: int | None = None
    floor: float | None = None
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    flops: float | None = None
    bytes: float | None = None
    metrics: dict[str, Any] | None = None


def finish(
    bench: str,
    machine: Machine,
    rows: Sequence[BenchRow],
    output: Path | None,
    file: str | None = None,
    as_json: bool | None = None,
) -> dict[str, Any]:
    """Print the rows, append the run to `output` (a file, or a directory for `file`), print JSON.

    Returns the run.
    """
    plain = [msgspec.to_builtins(row) for row in rows]
    record = run_record(bench, machine, shlex.join(["tpdet", *sys.argv[1:]]), plain)
    print_rows(rows)
    if output is not None:
        append_record(output, file or bench, record)
    print_line(record, as_json)
    return record


def print_line(record: dict[str, Any], as_json: bool | None = None) -> None:
    """One line of JSON on stdout; None: unless that is a terminal."""
    if as_json is None:
        as_json = not sys.stdout.isatty()
    if as_json:
        print_utf8([msgspec.json.encode(record)])


def print_rows(rows: Sequence[BenchRow]) -> None:
    """A table without empty columns; the floor stands before the value."""
    names = ("case", "model", "dtype", "mode", "tp", "batch", "context")
    used = [name for name in names if any(getattr(row, name) is not None for row in rows)]
    table = Table()
    for column in used:
        table.add_column(column)
    figures = [
        name
        for name in ("floor", "value", "peer", "ratio")
        if any(getattr(row, name) is not None for row in rows)
    ]
    for column in figures:
        table.add_column(column, justify="right")
    for row in rows:
        peer = "" if row.peer is None else f"{row.peer} {row.peer_value:,.2f}"
        shown = {
            "floor": "" if row.floor is None else f"{row.floor:,.2f}",
            "value": f"{row.value:,.2f} {row.unit}",
            "peer": peer,
            "ratio": "" if row.ratio is None else f"{row.ratio:.2f}",
        }
        table.add_row(
            *(_text(getattr(row, name)) for name in used), *(shown[name] for name in figures)
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)


def _text(value: object) -> str:
    return "" if value is None else str(value)
