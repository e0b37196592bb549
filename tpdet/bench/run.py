"""`tpdet bench`: one world a tensor-parallel size; a table, and rows in a results file."""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tpdet.bench.rank import BenchResult, BenchRow, BenchSpec
from tpdet.verify.report import append_run
from tpdet.verify.run import parse_sizes
from tpdet.verify.worlds import run_world


def bench_command(options: argparse.Namespace) -> int:
    """Run the benchmark of `tpdet bench` and print its rows."""
    spec = BenchSpec(
        model=options.model,
        dtype=options.dtype,
        load_format=options.load_format,
        device=options.device,
        fold_order=options.fold_order,
        batches=parse_sizes(options.batch),
        prompt_tokens=options.prompt_tokens,
        prefill_tokens=options.prefill_tokens,
        prefill_prompts=options.prefill_prompts,
        budget=options.budget,
        steps=options.steps,
    )
    results: list[BenchResult] = []
    with tempfile.TemporaryDirectory(prefix="tpdet-bench-") as name:
        folder = Path(name)
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        for tp in parse_sizes(options.tp):
            result = folder / f"tp{tp}.json"
            run_world(tp, "tpdet.bench.rank", [str(folder / "spec.json"), str(result)], folder)
            results.append(msgspec.json.decode(result.read_bytes(), type=BenchResult))
    rows = [row for result in results for row in result.rows]
    _print(rows)
    if options.output is not None:
        command = shlex.join(["tpdet", *sys.argv[1:]])
        plain = [msgspec.to_builtins(row) for row in rows]
        largest = max((result.machine for result in results), key=lambda found: found.gpus)
        append_run(options.output, "latency", largest, command, plain)
    return 0


def _print(rows: list[BenchRow]) -> None:
    table = Table()
    for column in ("case", "model", "dtype", "TP", "batch", "context"):
        table.add_column(column)
    table.add_column("value", justify="right")
    table.add_column("floor", justify="right")
    for row in rows:
        table.add_row(
            row.case, row.model, row.dtype, str(row.tp), str(row.batch), str(row.context),
            f"{row.value:,.2f} {row.unit}", "" if row.floor is None else f"{row.floor:,.2f}",
        )  # fmt: skip
    Console().print(table)
