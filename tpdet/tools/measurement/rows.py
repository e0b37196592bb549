"""Output of a benchmark: a table, a run in a results file, one JSON line on stdout.

The last line of stdout is the run as the results file holds it, if `--json` is given, or stdout is
no terminal and `--no-json` is not.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tpdet.launch.host.standard_streams import print_utf8
from tpdet.tools.measurement.floor import CaseWork
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

    def beside(self, peer: str, value: float, **fields: Any) -> "BenchRow":
        """The row with a peer's figure of the same unit, and with more fields."""
        ratio = None
        if not self.unit.endswith("/s"):
            ratio = self.value / value
        elif self.value:
            ratio = value / self.value
        return msgspec.structs.replace(self, peer=peer, peer_value=value, ratio=ratio, **fields)


def kernel_row(
    case: str,
    value: float,
    floor: float | None,
    peer: tuple[str, float] | None = None,
    work: CaseWork | None = None,
    **fields: Any,
) -> BenchRow:
    """The row of a kernel on a GPU that took `value` us, beside its peer's, else its floor's.

    peer: its name, and its microseconds. work: what one GPU computes and moves.
    """
    base = peer[1] if peer else floor
    counted = {} if work is None else {"flops": work.flops, "bytes": work.bytes}
    return BenchRow(
        **{"dtype": "bfloat16"} | counted | fields,
        case=case,
        value=value,
        unit="us",
        floor=floor,
        peer=peer[0] if peer else None,
        peer_value=peer[1] if peer else None,
        ratio=value / base if base else None,
    )


def finish(
    bench: str,
    machine: Machine,
    rows: Sequence[BenchRow],
    output: Path | None,
    file: str | None = None,
    as_json: bool | None = None,
) -> int:
    """Print the rows, `keep` the run, print it as JSON where `print_line` does; exit code 0."""
    print_rows(rows)
    print_line(keep(bench, machine, rows, output, file), as_json)
    return 0


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


_FIGURES: dict[str, Callable[[BenchRow], str]] = {
    "floor": lambda row: "" if row.floor is None else f"{row.floor:,.2f}",
    "value": lambda row: f"{row.value:,.2f} {row.unit}",
    "peer": lambda row: "" if row.peer is None else f"{row.peer} {row.peer_value:,.2f}",
    "ratio": lambda row: "" if row.ratio is None else f"{row.ratio:.2f}",
}


def print_rows(rows: Sequence[BenchRow]) -> None:
    """A table without empty columns; the floor stands before the value."""
    names = ("case", "model", "dtype", "mode", "tp", "batch", "context", *_FIGURES)
    used = [name for name in names if any(getattr(row, name) is not None for row in rows)]
    shown = [[_cell(row, name) for name in used] for row in rows]
    left = [name for name in used if name not in _FIGURES]
    wide_console(160).print(make_table(used, shown, left))


def _cell(row: BenchRow, name: str) -> str:
    if name in _FIGURES:
        return _FIGURES[name](row)
    value = getattr(row, name)
    return "" if value is None else str(value)


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]
) -> Table:
    """A table of these rows; `left`: the columns that are not of figures."""
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def wide_console(width: int) -> Console:
    """Where tables go; of this width where standard output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=width)
