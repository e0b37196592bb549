"""Output of a benchmark: a table, a run in a results file, one JSON line on stdout.

The last line of stdout is the run as the results file holds it, if `--json` is given, or stdout is
no terminal and `--no-json` is not.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tpdet.launch.host.standard_streams import print_utf8
from tpdet.tools.measurement.results_file import append_record, run_record, this_command
from tpdet.tools.worlds.machine import Machine


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


def kernel_row(
    case: str,
    value: float,
    floor: float | None,
    peer: str | None = None,
    peer_value: float | None = None,
    **fields: Any,
) -> BenchRow:
    """The row of a kernel on a GPU that took `value` us, beside its peer's, else its floor's."""
    base = peer_value or floor
    return BenchRow(
        **{"dtype": "bfloat16"} | fields,
        case=case,
        value=value,
        unit="us",
        floor=floor,
        peer=peer,
        peer_value=peer_value,
        ratio=value / base if base else None,
    )


def finish(
    bench: str,
    machine: Machine,
    rows: Sequence[BenchRow],
    output: Path | None,
    file: str | None = None,
    as_json: bool | None = None,
) -> None:
    """Print the rows, `keep` the run, print it as JSON where `print_line` does."""
    print_rows(rows)
    print_line(keep(bench, machine, rows, output, file), as_json)


def keep(
    bench: str,
    machine: Machine,
    rows: Sequence[BenchRow],
    output: Path | None,
    file: str | None = None,
) -> dict[str, Any]:
    """The run of this command; appended to `output`: a file, a directory for `file`, or None."""
    plain = [msgspec.to_builtins(row) for row in rows]
    record = run_record(bench, machine, this_command(), plain)
    if output is not None:
        append_record(output, file or bench, record)
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
    wide_console(160).print(table)


def wide_console(width: int) -> Console:
    """Where tables go; of this width where standard output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def _text(value: object) -> str:
    return "" if value is None else str(value)
