"""Reads the measured figures that the planner's constants are fitted to, from results files.

A results file has several runs; of a figure measured again only the newest counts. The times of
tuned products are in the shape table, from which the runtime chooses its kernels.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tpdet.config import APPROXIMATE
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.tools.measurement.results_file import in_default_order, newest_rows

SHAPE_TABLE = "kernels/cuda/gemm/choice/shape_tables/nvidia-{gpu}.json"
OLD_OVERLAP_PROGRAMS = 16
"""Multiprocessors of an exchange that overlaps products, in the commits OLD_COMMITS."""
EXPERTS_CASE = "experts of a layer"
OLD_COMMITS = ("b513469",)
LINEAR_MODEL = "qwen3.5-9b"
LINEAR_CASE = re.compile("linear (decode|prefill): all kernels")

_MODEL = "qwen3-8b"  # of the attention that was timed
_PREFILL_ATTENTION = re.compile(r"attention prefill, (\d+) x (\d+) tokens, head 128")


@dataclass(frozen=True)
class StepFigure:
    """A measured decode step (seconds) or prefill (tokens a second) of a model.

    budget: rows of a step, at most; fold_order: the measured one; overlapped: multiprocessors of
    an exchange that overlaps products, None for the present number.
    """

    case: str
    model: str
    tp: int
    batch: int
    context: int
    value: float
    budget: int
    commit: str
    overlapped: int | None
    fold_order: str = DEFAULT_FOLD_ORDER


def step_figures(results: Path, gpu: str) -> list[StepFigure]:
    """Figures sorted by case, model, size and batch; of the default fold order where measured."""
    found = []
    for run, row in in_default_order(newest_rows(results / f"latency.{gpu}.json")):
        if row["case"] not in ("decode", "prefill"):
            continue
        budget = row.get("budget") or _budget_of(run["command"])
        scale = 1e-3 if row["unit"] == "ms" else 1.0
        found.append(
            StepFigure(
                row["case"],
                row["model"],
                row["tp"],
                row["batch"],
                row["context"],
                scale * row["value"],
                budget,
                run["commit"],
                OLD_OVERLAP_PROGRAMS if run["commit"] in OLD_COMMITS else None,
                row["mode"],
            )
        )
    return sorted(found, key=lambda f: (f.case, f.model, f.tp, f.batch, f.context))


def _budget_of(command: str) -> int:
    """Tokens of a step in runs whose rows do not name them."""
    found = re.search(r"--budget (\d+)", command)
    return int(found.group(1)) if found else 2048


@dataclass(frozen=True)
class ProductFigure:
    """Microseconds of one tuned product: x [rows, k] times weight [n, k], with `roots` sums."""

    kind: str
    rows: int
    n: int
    k: int
    roots: int
    us: float


class LinearFigure(NamedTuple):
    """Microseconds of one linear layer of LINEAR_MODEL beside its products, on one of `tp` ranks.

    A row (decode) or a prompt of `context` tokens of each of `batch` sequences.
    """

    decode: bool
    tp: int
    batch: int
    context: int
    us: float


def product_figures(table: Path) -> list[ProductFigure]:
    """The figures of every product and number of rows in a shape table."""
    found = []
    for product in json.loads(table.read_text(encoding="utf-8"))["products"]:
        roots = len(product.get("roots", "").split())
        k = product["k"] * product["leaves"]
        for rows, choice in product["rows"].items():
            found.append(
                ProductFigure(product["kind"], int(rows), product["n"], k, roots, choice["us"])
            )
    return found


def linear_figures(results: Path, gpu: str) -> list[LinearFigure]:
    """Figures of all kernels of a linear layer; the newest of each."""
    path = linear_file(results, gpu)
    return [
        LinearFigure(
            match[1] == "decode", *(row[key] for key in ("tp", "batch", "context", "value"))
        )
        for row in (_kernel_rows(path) if path.exists() else ())
        if (match := LINEAR_CASE.fullmatch(row["case"]))
    ]


def linear_file(results: Path, gpu: str) -> Path:
    """The file with figures of linear attention."""
    return results / f"linear.{gpu}.json"


def expert_figures(results: Path, gpu: str) -> list[tuple[str, int, float]]:
    """(model shape, rows, us) of a layer's experts on one GPU; the newest of each."""
    return [
        (row["model"], row["batch"], row["value"])
        for row in _kernel_rows(experts_file(results, gpu))
        if row["case"] == EXPERTS_CASE
        and row.get("tp", 1) == 1
        and not row.get("metrics", {}).get("skew")
    ]


def experts_file(results: Path, gpu: str) -> Path:
    """The file with figures of experts."""
    return results / f"experts.{gpu}.json"


def decode_attention_figures(results: Path, gpu: str) -> list[tuple[int, int, float]]:
    """(batch, context, us) of 32 query and 8 key heads of size 128; the newest of each."""
    found: dict[tuple[int, int], float] = {}
    for name in ("kernels", "attention"):
        for row in _kernel_rows(results / f"{name}.{gpu}.json"):
            whole = row.get("tp", 1) == 1 and row.get("model", _MODEL) == _MODEL
            if row["case"] == "attention decode" and whole and row.get("mode") != APPROXIMATE:
                found[row["batch"], row["context"]] = row["value"]
    return [(batch, context, us) for (batch, context), us in found.items()]


def prefill_attention_figures(results: Path, gpu: str) -> list[tuple[int, int, float]]:
    """(prompts, tokens of each, us) at head size 128, of the fastest mode, which serves."""
    found: dict[tuple[int, int], float] = {}
    for row in _kernel_rows(results / f"kernels.{gpu}.json"):
        match = _PREFILL_ATTENTION.fullmatch(row["case"])
        if match:
            key = int(match.group(1)), int(match.group(2))
            found[key] = min(row["value"], found.get(key, row["value"]))
    return [(prompts, tokens, us) for (prompts, tokens), us in found.items()]


def exchange_rows(results: Path, gpu: str) -> list[dict[str, Any]]:
    """Rows of exchanges of [batch, hidden 4096], with NCCL's `gather` in us where measured."""
    rows = _kernel_rows(results / f"allreduce.{gpu}.json")
    return [row for row in rows if row["case"] == "allreduce"]


def sampling_figures(results: Path, gpu: str) -> list[tuple[int, int, float]]:
    """(ranks, rows, us) of greedy sampling over Qwen3's vocabulary."""
    return [
        (row["tp"], row["batch"], row["value"])
        for row in _kernel_rows(results / f"kernels.{gpu}.json")
        if row["case"] == "sampler greedy"
    ]


def commits(path: Path, case: str = ".*") -> tuple[str, ...]:
    """The commits of the runs in a results file that have a newest figure of such a case."""
    runs = (
        run["commit"]
        for run, rows in newest_rows(path)
        if any(re.fullmatch(case, row["case"]) for row in rows)
    )
    return tuple(dict.fromkeys(runs))


def _kernel_rows(path: Path) -> Iterator[dict[str, Any]]:
    for _, rows in newest_rows(path):
        yield from rows
