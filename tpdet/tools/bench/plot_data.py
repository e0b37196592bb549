"""Data of the plots, from rows of results files: curves of decode steps, roofline points."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.config import APPROXIMATE
from tpdet.errors import UsageError
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.tools.measurement.floor import CaseWork, decode_work, prefill_work
from tpdet.tools.measurement.results_file import Row, Run, in_default_order, newest_rows
from tpdet.tools.worlds.shapes import named_config

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_STEPS = ("decode", "prefill")

Load = tuple[str, int, str]  # case, batch, unit

_MEANT = {"LLM": "batch", "HTTP": "readers"}
"""What `batch` counts, by the interface that a case names first."""


@dataclass(frozen=True)
class Curve:
    """Decode steps of one model, size, mode and context: (batch, milliseconds), by batch."""

    model: str
    tp: int
    mode: str
    context: int
    steps: tuple[tuple[int, float], ...]

    @property
    def label(self) -> str:
        """As the legend has it."""
        return f"TP {self.tp}, {self.mode}, context {self.context}"


@dataclass(frozen=True)
class Growth:
    """Decode steps of one size, batch and mode: (context, milliseconds), by context."""

    tp: int
    batch: int
    steps: tuple[tuple[int, float], ...]
    mode: str


@dataclass(frozen=True)
class DeterminismCost:
    """What determinism costs in the same engine: time by case, over that of approximate arithmetic.

    mode: the strict one; cases: (name of the case, ratio), a ratio of 1 being no cost.
    """

    tp: int
    mode: str
    cases: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Point:
    """A case on one GPU: operations a byte, operations a second, and its group in the plot."""

    group: str
    intensity: float
    speed: float


def curves(results: Iterable[tuple[Run, list[Row]]]) -> list[Curve]:
    """Curves of decode rows in the default fold order, else another, and of approximate ones.

    Of several contexts only the shortest one is drawn.
    """
    runs = list(results)
    strict = [row for _, row in in_default_order(runs)]
    approximate = [row for _, rows in runs for row in rows if row.get("mode") == APPROXIMATE]
    steps: dict[tuple[str, int, str, int], dict[int, float]] = {}
    for row in strict + approximate:
        if row["case"] == "decode" and row["unit"] == "ms":
            key = row["model"], row["tp"], row["mode"], row["context"]
            steps.setdefault(key, {})[row["batch"]] = row["value"]
    shortest = {
        model: min(context for other, _, _, context in steps if other == model)
        for model, _, _, _ in steps
    }
    return [
        Curve(*key, tuple(sorted(times.items())))
        for key, times in sorted(steps.items())
        if key[3] == shortest[key[0]]
    ]


def by_context(results: Iterable[tuple[Run, list[Row]]]) -> dict[str, list[Growth]]:
    """By model, where a batch was timed at more than one context.

    Of one strict mode: the default fold order, or the first where that was not timed so.
    """
    steps: dict[str, dict[str, dict[tuple[int, int], dict[int, float]]]] = {}
    for _, rows in results:
        for row in rows:
            if row["case"] != "decode" or row["unit"] != "ms" or _approximate(row):
                continue
            modes = steps.setdefault(row["model"], {})
            cases = modes.setdefault(row.get("mode") or "", {})
            cases.setdefault((row["tp"], row["batch"]), {})[row["context"]] = row["value"]
    grown: dict[str, list[Growth]] = {}
    for model, modes in steps.items():
        for mode in sorted(modes, key=lambda mode: mode != DEFAULT_FOLD_ORDER):
            growth = [
                Growth(tp, batch, tuple(sorted(times.items())), mode)
                for (tp, batch), times in sorted(modes[mode].items())
                if len(times) > 1
            ]
            if growth:
                grown.setdefault(model, growth)
    return grown


def costs(results: Iterable[tuple[Run, list[Row]]]) -> dict[str, list[DeterminismCost]]:
    """By model, size and strict mode, of cases that one commit measured both ways, one transport.

    `results` hold every run, not the newest rows alone: what counts is the newest commit that has
    both, for figures of two machines are no comparison. Of its strict modes the default fold order
    counts, else the first that was measured.
    """
    times: dict[tuple[str, int, str, str], dict[str | None, dict[str, float]]] = {}
    for run, rows in results:
        for row in rows:
            seconds = _case_seconds(row)
            if seconds is None:
                continue
            order, _, transport = row.get("mode", "").partition(", ")
            key = row["model"], row["tp"], transport, _case_name(row)
            times.setdefault(key, {}).setdefault(run.get("commit"), {})[order] = seconds
    by_size: dict[tuple[str, int, str], dict[str, float]] = {}
    for (model, tp, _, name), commits in times.items():
        for orders in reversed(commits.values()):
            strict = [order for order in orders if order != APPROXIMATE]
            if APPROXIMATE not in orders or not strict:
                continue
            order = DEFAULT_FOLD_ORDER if DEFAULT_FOLD_ORDER in strict else strict[0]
            ratio = orders[order] / orders[APPROXIMATE]
            by_size.setdefault((model, tp, order), {}).setdefault(name, ratio)
            break
    made: dict[str, list[DeterminismCost]] = {}
    for (model, tp, order), cases in sorted(by_size.items()):
        named = sorted(cases.items(), key=lambda case: _by_numbers(case[0]))
        made.setdefault(model, []).append(DeterminismCost(tp, order, tuple(named)))
    return made


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A sort key for names: numbers inside them count by their size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def points(results: Iterable[tuple[Run, list[Row]]]) -> list[Point]:
    """Points of rows that say their work, and of steps of well-known models.

    Steps are those of the default fold order, or of another where that was not timed.
    """
    configs: dict[str, ModelConfig | None] = {}
    measured = []
    runs = list(results)
    others = [row for _, rows in runs for row in rows if row["case"] not in _STEPS]
    kernels = [row for row in others if not _approximate(row)]
    steps = [row for _, row in in_default_order(runs) if row["case"] in _STEPS]
    for row in kernels + steps:
        work = _work(row, configs)
        if work is None or not work.flops or not work.bytes:
            continue
        measured.append(Point(_group(row), work.flops / work.bytes, work.flops / _seconds(row)))
    return measured


def peer_rows(path: Path, model: str) -> list[Row]:
    """Rows of a peer file that stand beside the figure of the engine that was compared last.

    Of each load at each size the newest: an older row may name its dtype, which HTTP does not tell.
    """
    rows = [row for _, newest in newest_rows(path) for row in newest]
    rows = [row for row in rows if row["model"] == model and row.get("peer") and row.get("ratio")]
    newest = {(*load_of(row), row["tp"]): row for row in rows if row["peer"] == rows[-1]["peer"]}
    return list(newest.values())


def load_of(row: Row) -> Load:
    """The load that a row measured."""
    return row["case"], row.get("batch", 0), row["unit"]


def load_name(row: Row) -> str:
    """A load as tables and pictures name it: `LLM decode, batch 16`."""
    if row.get("batch") is None:
        return str(row["case"])
    return f"{row['case']}, {_MEANT[row['case'].split()[0]]} {row['batch']}"


def _approximate(row: Row) -> bool:
    mode: str = row.get("mode") or ""
    return mode.partition(", ")[0] == APPROXIMATE


def _case_seconds(row: Row) -> float | None:
    """The time of a case of the engine; None for another."""
    if (row["case"], row["unit"]) in (("decode", "ms"), ("prefill", "tokens/s"), ("mixed", "s")):
        return _seconds(row)
    return None


def _case_name(row: Row) -> str:
    if row["case"] == "decode":
        return f"decode, batch {row['batch']}, context {row['context']:,}"
    if row["case"] == "prefill":
        return f"prefill, {row['batch']} prompts of {row['context']:,}"
    return f"mixed, {row.get('batch')} requests"


def _work(row: Row, configs: dict[str, ModelConfig | None]) -> CaseWork | None:
    """Operations and bytes of a row's case on one GPU; None if they are unknown."""
    if row.get("flops") and row.get("bytes") and row["unit"] in _SECONDS:
        return CaseWork(row["flops"], row["bytes"])
    if row["case"] not in _STEPS:
        return None
    name = row["model"]
    if name not in configs:
        try:
            configs[name] = named_config(name)
        except UsageError:  # a model that only its measurer knows
            configs[name] = None
    config = configs[name]
    if config is None:
        return None
    work = decode_work if row["case"] == "decode" else prefill_work
    return work(config, row["batch"], row["context"]).over(row["tp"])


def _seconds(row: Row) -> float:
    if row["unit"] == "tokens/s":
        return row["batch"] * row["context"] / row["value"]
    return float(row["value"]) * _SECONDS[row["unit"]]


def _group(row: Row) -> str:
    if row["case"] in _STEPS:
        return f"{row['case']} of the model, TP {row['tp']}"
    kind = str(row["case"]).split()[0]
    return "attention, " + str(row["case"]).split()[1] if kind == "attention" else kind
