"""What the pictures show, out of results files' rows: curves of decode steps, roofline points."""

from collections.abc import Iterable
from dataclasses import dataclass

from tpdet.bench.floor import Work, decode_work, prefill_work
from tpdet.bench.results import Row, Run
from tpdet.bench.shapes import named_config
from tpdet.errors import UsageError
from tpdet.model_config import ModelConfig

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


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
    """Decode steps of one size and batch: (context, milliseconds), by context."""

    tp: int
    batch: int
    steps: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Point:
    """A case on one GPU: operations a byte, operations a second, and the group it is drawn in."""

    group: str
    intensity: float
    speed: float


def curves(found: Iterable[tuple[Run, list[Row]]]) -> list[Curve]:
    """Of all decode rows; of several contexts only the shortest one's."""
    steps: dict[tuple[str, int, str, int], dict[int, float]] = {}
    for _, rows in found:
        for row in rows:
            if row["case"] == "decode" and row["unit"] == "ms":
                key = row["model"], row["tp"], row.get("mode", ""), row["context"]
                steps.setdefault(key, {})[row["batch"]] = row["value"]
    shortest = {
        model: min(context for other, _, _, context in steps if other == model)
        for model, _, _, _ in steps
    }
    return [
        Curve(*key, tuple(sorted(mine.items())))
        for key, mine in sorted(steps.items())
        if key[3] == shortest[key[0]]
    ]


def by_context(found: Iterable[tuple[Run, list[Row]]]) -> dict[str, list[Growth]]:
    """By model, where a batch was timed at more than one context; of its first mode only."""
    steps: dict[str, dict[tuple[int, int], dict[int, float]]] = {}
    modes: dict[str, str] = {}
    for _, rows in found:
        for row in rows:
            if row["case"] != "decode" or row["unit"] != "ms":
                continue
            model, mode = row["model"], row.get("mode", "")
            if modes.setdefault(model, mode) == mode:
                mine = steps.setdefault(model, {}).setdefault((row["tp"], row["batch"]), {})
                mine[row["context"]] = row["value"]
    grown = {
        model: [
            Growth(tp, batch, tuple(sorted(mine.items())))
            for (tp, batch), mine in sorted(cases.items())
            if len(mine) > 1
        ]
        for model, cases in steps.items()
    }
    return {model: growth for model, growth in grown.items() if growth}


def points(found: Iterable[tuple[Run, list[Row]]]) -> list[Point]:
    """Of rows that say their work, and of decode and prefill of well-known models."""
    configs: dict[str, ModelConfig | None] = {}
    measured = []
    for _, rows in found:
        for row in rows:
            work = _work(row, configs)
            if work is None or not work.flops or not work.bytes:
                continue
            measured.append(Point(_group(row), work.flops / work.bytes, work.flops / _seconds(row)))
    return measured


def _work(row: Row, configs: dict[str, ModelConfig | None]) -> Work | None:
    """What a row's case does on one GPU, if that is known."""
    if row.get("flops") and row.get("bytes") and row["unit"] in _SECONDS:
        return Work(row["flops"], row["bytes"])
    if row["case"] not in ("decode", "prefill"):
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
        seconds: float = row["batch"] * row["context"] / row["value"]
        return seconds
    return float(row["value"]) * _SECONDS[row["unit"]]


def _group(row: Row) -> str:
    if row["case"] in ("decode", "prefill"):
        return f"{row['case']} of the model, TP {row['tp']}"
    kind = str(row["case"]).split()[0]
    return "attention, " + str(row["case"]).split()[1] if kind == "attention" else kind
