"""Writes the tables of docs/results/*.json into README.md and pages of docs.

    python scripts/result_tables.py [--check]

A table shows one run and names its command and machine. A figure that a newer run of the same file
measured again is left out. Files of many rows are summarised by case. README.md gets tpdet beside
vLLM, docs/results.md the default fold order by size and every table, docs/numerics.md the fold
orders end to end, docs/scaling.md what the planner predicts. With --check nothing is written: the
exit code is 1 when a table is stale.
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

from scripts.tables.fold_table import fold_table  # noqa: E402
from scripts.tables.peer_table import main_rows, peer_table  # noqa: E402
from scripts.tables.planned_steps import comparison_table  # noqa: E402
from scripts.tables.size_table import size_table  # noqa: E402
from tpdet.tools.bench.plot_data import peer_rows  # noqa: E402
from tpdet.tools.measurement.results_file import newest_rows  # noqa: E402
from tpdet.tools.plan.constants import load_constants  # noqa: E402

SUMMARISED = ("gemm", "attention", "allreduce", "sampler")
NOT_SHOWN = ("kernels.h200.json", "bits.h100.json", "bits.h200.json")
"""Files of many rows, which docs/results.md links to."""
FOLDS = "latency.h200.json"
SIZES = ("latency.h200.json", "throughput.h200.json")
PEER = "peer.h200.json"
MODEL = "qwen3-8b"  # of the table of sizes


def stamp(run: dict) -> str:
    """Where and how a run was made."""
    where = run["gpu"] if not run.get("gpus") else f"{run['gpus']} x {run['gpu']}"
    return f"`{run['command']}` on {where}, torch {run['torch']}, {run['date']}, {run['commit']}"


def verify_table(path: Path) -> list[str]:
    """How many relations were equal, by model, dtype and size; the control is marked.

    Also by launcher, transport and number of nodes, if the run varied one of them.
    """
    lines = []
    for run in json.loads(path.read_text()):
        control = any(row.get("control") for row in run["rows"])
        cells: dict[tuple[str, ...], dict[int, list[bool]]] = {}
        ways = any(way_of(row) != way_of({}) for row in run["rows"])
        for row in run["rows"]:
            key = row["model"], row["dtype"], *(way_of(row) if ways else ())
            cells.setdefault(key, {}).setdefault(row["tp"], []).append(row["equal"])
        sizes = sorted({row["tp"] for row in run["rows"]})
        lines += [f"{'Control (must differ): ' if control else ''}{stamp(run)}", ""]
        names = ["model", "dtype", *(("launcher", "transport", "nodes") if ways else ())]
        lines += ["| " + " | ".join([*names, *(f"TP {n}" for n in sizes)]) + " |"]
        lines += ["|" + "---|" * (len(names) + len(sizes))]
        for key, found in cells.items():
            counts = [
                f"{sum(found[n])} of {len(found[n])} equal" if n in found else "" for n in sizes
            ]
            lines.append("| " + " | ".join([*key, *counts]) + " |")
        lines.append("")
    return lines


def way_of(row: dict) -> tuple[str, str, str]:
    """Launcher, transport and nodes of a verification's row."""
    return row.get("launcher", "self"), row.get("transport", "auto"), str(row.get("nodes", 1))


def fuzz_table(path: Path) -> list[str]:
    """How many answers of the semantics fuzzer were equal, by model and server, and what it met."""
    counted = {
        "preemptions": "preemptions",
        "accepted_tokens": "accepted draft tokens",
        "cached_tokens": "cached tokens",
        "given_up": "streams given up",
    }
    lines = []
    for run in json.loads(path.read_text()):
        names = ["model", "server", "TP", "equal", *counted.values()]
        lines += [stamp(run), "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        for row in run["rows"]:
            equal = f"{row['compared'] - row['different']} of {row['compared']}"
            cells = [row["model"], row["case"], row["tp"], equal, *(row[name] for name in counted)]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    return lines


def value_tables(path: Path) -> list[str]:
    """Figures with their floors and peers: one table for each run."""
    make = summary if path.name.split(".")[0] in SUMMARISED else value_table
    return [line for run, rows in newest_rows(path) for line in make(run, rows)]


def number(value: float) -> str:
    """A figure with two decimals; a count with none, a small one by its power of ten."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}"


def value_table(run: dict, rows: list[dict]) -> list[str]:
    """One line for each figure."""
    names = ("case", "model", "dtype", "mode", "tp", "batch", "context")
    used = [name for name in names if any(row.get(name) is not None for row in rows)]
    lines = [stamp(run), "", "| " + " | ".join([*used, "value", "floor", "peer", "ratio"]) + " |"]
    lines.append("|" + "---|" * (len(used) + 4))
    for row in rows:
        cells = [str(row.get(name, "")) for name in used]
        cells.append(f"{number(row['value'])} {row['unit']}")
        cells.append(number(row["floor"]) if row.get("floor") is not None else "")
        peer = f"{row['peer']} {number(row['peer_value'])}" if row.get("peer") else ""
        cells += [peer, f"{row['ratio']:.2f}" if row.get("ratio") is not None else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def summary(run: dict, rows: list[dict]) -> list[str]:
    """One line for each case, mode, size and peer: number of figures, mean and worst ratio."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row.get("ratio"):
            key = tuple(str(row.get(name, "")) for name in ("case", "model", "mode", "tp"))
            groups.setdefault((*key, row.get("peer", "floor")), []).append(row)
    lines = [
        stamp(run),
        "",
        "| case | model | mode | tp | over | figures | geometric mean | worst |",
    ]
    lines.append("|" + "---|" * 8)
    for key, mine in groups.items():
        mean = math.exp(math.fsum(math.log(row["ratio"]) for row in mine) / len(mine))
        worst = max(mine, key=lambda row: row["ratio"])
        where = f"{worst['ratio']:.2f} at batch {worst['batch']}"
        where += f", {worst['context']}" if worst.get("context") else ""
        lines.append("| " + " | ".join([*key, str(len(mine)), f"{mean:.2f}", where]) + " |")
    return [*lines, ""]


TABLES = {"verify": verify_table, "fuzz": fuzz_table}
"""Makers of tables for files that hold no figures with floors and peers."""


def render() -> str:
    """Every table, in the order of the files' names."""
    lines: list[str] = []
    for path in sorted((ROOT / "docs" / "results").glob("*.json")):
        if path.name in NOT_SHOWN:
            continue
        lines += [f"**{path.name}**", ""]
        table = TABLES.get(path.name.split(".")[0], value_tables)
        lines += table(path)
    return "\n".join(lines).strip()


def replaced(path: Path, name: str, content: str) -> bool:
    """Put `content` between a page's marks of `name`; True if it stood there already.

    With --check nothing is written.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    text = path.read_text()
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    wanted = f"{head}{begin}\n\n{content}\n\n{end}{tail}"
    if wanted != text and "--check" not in sys.argv:
        path.write_text(wanted)
    return wanted == text


def of_one_gpu(rows: list[dict]) -> list[dict]:
    """The rows of TP 1, by case in the order in which any size has them."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    return sorted((row for row in rows if row["tp"] == 1), key=lambda row: cases.index(row["case"]))


def main() -> int:
    """Rewrite the tables, or with --check compare them; the exit code."""
    results = ROOT / "docs" / "results"
    folds = "\n".join(fold_table(results / FOLDS))
    sizes = "\n".join(size_table([results / name for name in SIZES], MODEL))
    peer = "\n".join(peer_table(of_one_gpu(main_rows(peer_rows(results / PEER, MODEL)))))
    planned = "\n".join(comparison_table(load_constants("h200"), results))
    pages = [
        replaced(ROOT / "README.md", "peer", peer),
        replaced(ROOT / "docs" / "results.md", "sizes", sizes),
        replaced(ROOT / "docs" / "results.md", "results", render()),
        replaced(ROOT / "docs" / "numerics.md", "folds", folds),
        replaced(ROOT / "docs" / "scaling.md", "predicted", planned),
    ]
    return 0 if all(pages) or "--check" not in sys.argv else 1


if __name__ == "__main__":
    sys.exit(main())
