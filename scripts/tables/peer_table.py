"""Ours beside another engine's, both through their public interfaces: a Markdown table."""

from tpdet.tools.bench.plot_data import Load, load_name, load_of
from tpdet.tools.measurement.results_file import Row

_AT_MOST_READERS = ("HTTP between tokens, P99", "HTTP first token, mean")
"""Cases of which a short page has only what is measured at the most readers."""
_LEFT_OUT = (
    "HTTP a later token, mean",
    "HTTP whole answer, P99",
    "LLM prefill of 8,192",
    "LLM start, empty kernel cache",
)
"""Cases of which a short page has nothing."""


def main_rows(rows: list[Row]) -> list[Row]:
    """The rows that fit a short page."""
    most = max((row["batch"] for row in rows if row["case"] in _AT_MOST_READERS), default=0)
    return [
        row
        for row in rows
        if row["case"] not in _LEFT_OUT
        and (row["case"] not in _AT_MOST_READERS or row["batch"] == most)
    ]


def peer_table(rows: list[Row]) -> list[str]:
    """Lines: loads down, sizes and engines across, the better figure of a pair in bold."""
    loads: dict[Load, dict[int, Row]] = {}
    for row in rows:
        loads.setdefault(load_of(row), {})[row["tp"]] = row
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
