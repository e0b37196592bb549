"""Results files: JSON lists of runs, newest last; a run has its environment and its rows."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS
from tpdet.tools.worlds.machine import Machine

Run = dict[str, Any]
Row = dict[str, Any]

CASE = ("case", "model", "dtype", "mode", "tp", "batch", "context", "peer")
"""The fields that say what a row measured; rows alike in them replace each other."""


def newest_rows(path: Path) -> list[tuple[Run, list[Row]]]:
    """Runs of a file, oldest first, each with the rows that no newer run measured again."""
    seen: set[tuple[Any, ...]] = set()
    newest: list[tuple[Run, list[Row]]] = []
    for run in reversed(json.loads(path.read_text(encoding="utf-8"))):
        keys = [tuple(row.get(name) for name in CASE) for row in run["rows"]]
        rows = [row for row, key in zip(run["rows"], keys, strict=True) if key not in seen]
        seen.update(keys)
        if rows:
            newest.append((run, rows))
    return newest[::-1]


def all_rows(path: Path) -> list[tuple[Run, list[Row]]]:
    """Runs of a file, oldest first, each with all its rows."""
    return [(run, run["rows"]) for run in json.loads(path.read_text(encoding="utf-8"))]


def in_default_order(results: Iterable[tuple[Run, list[Row]]]) -> list[tuple[Run, Row]]:
    """Choose for each case the row of the default fold order, else the newest of another order.

    `results` are what `newest_rows` gives. Approximate arithmetic, gathered row layers and modes
    that name a transport are left out; a row's `mode` says which order it was measured in.
    """
    chosen: dict[tuple[Any, ...], tuple[Run, Row]] = {}
    for run, rows in results:
        for row in rows:
            if row.get("mode") not in FOLD_ORDERS:
                continue
            key = tuple(row.get(name) for name in CASE if name != "mode")
            known = chosen.get(key)
            is_default = known is not None and known[1]["mode"] == DEFAULT_FOLD_ORDER
            if row["mode"] == DEFAULT_FOLD_ORDER or not is_default:
                chosen[key] = run, row
    return list(chosen.values())


def append_run(path: Path, bench: str, machine: Machine, command: str, rows: list) -> None:
    """Add one run to a results file; see `append_record`."""
    append_record(path, bench, run_record(bench, machine, command, rows))


def this_command() -> str:
    """The command line of this process, as a run names it."""
    return shlex.join(["tpdet", *sys.argv[1:]])


def run_record(bench: str, machine: Machine, command: str, rows: list) -> dict[str, Any]:
    """The entry of one run in a results file: its rows and its environment."""
    return {
        "bench": bench,
        "gpu": machine.gpu,
        "gpus": machine.gpus,
        "commit": _commit(),
        "torch": metadata.version("torch"),
        "triton": _version("triton"),
        "driver": machine.driver,
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "command": command,
        "rows": rows,
    }


def append_record(path: Path, name: str, record: dict[str, Any]) -> None:
    """Add a run to a file, whole, newest last; a directory gets `<name>.<gpu>.json` in it."""
    if path.is_dir():
        path /= f"{name}.{short_name(record['gpu'])}.json"
    runs = msgspec.json.decode(path.read_bytes()) if path.exists() else []
    runs.append(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
    temporary.replace(path)


def short_name(gpu: str) -> str:
    """The name of a GPU in file names: "NVIDIA H200" becomes "h200"."""
    words = [word for word in gpu.lower().split() if word not in ("nvidia", "tesla", "geforce")]
    return "-".join(words)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout; None outside of one."""
    here = Path(__file__).resolve().parent
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None
