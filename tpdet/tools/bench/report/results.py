"""Reading results files: the newest figure of each case, with the run that gave it."""

import json
from pathlib import Path
from typing import Any

Run = dict[str, Any]
Row = dict[str, Any]

CASE = ("case", "model", "dtype", "mode", "tp", "batch", "context", "peer")
"""The fields that say what a row measured; rows alike in them replace each other."""


def newest_rows(path: Path) -> list[tuple[Run, list[Row]]]:
    """Runs of a file, oldest first, each with the rows that no newer run measured again."""
    seen: set[tuple[Any, ...]] = set()
    found: list[tuple[Run, list[Row]]] = []
    for run in reversed(json.loads(path.read_text(encoding="utf-8"))):
        keys = [tuple(row.get(name) for name in CASE) for row in run["rows"]]
        rows = [row for row, key in zip(run["rows"], keys, strict=True) if key not in seen]
        seen.update(keys)
        if rows:
            found.append((run, rows))
    return found[::-1]


def all_rows(path: Path) -> list[tuple[Run, list[Row]]]:
    """Runs of a file, oldest first, each with all its rows."""
    return [(run, run["rows"]) for run in json.loads(path.read_text(encoding="utf-8"))]
