"""Ours beside another engine's, both through their public interfaces: a Markdown table."""

from pathlib import Path

from tpdet.tools.bench.report.results import Row, newest_rows

Load = tuple[str, int, str]  # case, batch, unit

_MEANT = {"LLM": "batch", "HTTP": "readers"}
"""What `batch` counts, by the interface that a case names first."""
_AT_MOST_READERS = ("HTTP between tokens, P99", "HTTP first token, mean")
"""Cases of which a short page has only what is measured at the most readers."""
_LEFT_OUT = ("HTTP a later token, mean", "LLM start, empty kernel cache")
"""Cases of which a short page has nothing."""


def peer_rows(path: Path, model: str) -> list[Row]:
    """Rows of a peer file that stand beside the figure of the engine that was compared last.

    Of each load at each size the newest: an older row may name its dtype, which HTTP does not tell.
    """
    rows = [row for _, found in newest_rows(path) for row in found]
    rows = [row for row in rows if row["model"] == model and row.get("peer") and row.get("ratio")]
    newest = {(*_load(row), row["tp"]): row for row in rows if row["peer"] == rows[-1]["peer"]}
    return list(newest.values())


def main_rows(rows: list[Row]) -> list[Row]:
    """The rows that fit a short page."""
    most = max((row["batch"] for row in rows if row["case"] in _AT_MOST_READERS), default=0)
    return [
        row
        for row in rows
        if row["case"] not in _LEFT_OUT
        and (row["case"] not in _AT_MOST_READERS or row["batch"] == most)
    ]


def _load(row: Row) -> Load:
    return row["case"], row.get("batch", 0), row["unit"]


def load_name(row: Row) -> str:
    """A load as tables and pictures name it: `LLM decode, batch 16`."""
    if row.get("batch") is None:
        return str(row["case"])
    return f"{row['case']}, {_MEANT[row['case'].split()[0]]} {row['batch']}"


def peer_table(rows: list[Row]) -> list[str]:
    """Lines: loads down, sizes and engines across, the better figure of a pair in bold."""
    loads: dict[Load, dict[int, Row]] = {}
    for row in rows:
        loads.setdefault(_load(row), {})[row["tp"]] = row
    sizes = sorted({tp for found in loads.values() for tp in found})
    (peer,) = {row["peer"] for found in loads.values() for row in found.values()}
    cases = list(dict.fromkeys(case for case, _, _ in loads))
    lines = ["| load | " + " | ".join(f"TP {tp} | {peer}" for tp in sizes) + " |"]
    lines.append("|---|" + "--:|" * (2 * len(sizes)))
    for load in sorted(loads, key=lambda load: cases.index(load[0])):
        found = loads[load]
        name = load_name(next(iter(found.values())))
        cells = [cell for tp in sizes for cell in _pair(found.get(tp))]
        lines.append(f"| {name} [{load[2]}] | " + " | ".join(cells) + " |")
    return lines


def _pair(row: Row | None) -> tuple[str, str]:
    """Our figure and the other engine's; two empty cells where nothing was measured."""
    if row is None:
        return "", ""
    digits = 2 if row["value"] < 20 else 0
    ours, theirs = (f"{row[name]:,.{digits}f}" for name in ("value", "peer_value"))
    return (f"**{ours}**", theirs) if row["ratio"] < 1 else (ours, f"**{theirs}**")
