"""The planner's predictions beside measured figures: the table of docs/scaling.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.fit.figures import StepFigure, step_figures
from scripts.fit.steps import figure_world, predicted_seconds
from scripts.tables.other_orders import other_orders
from tpdet.tools.bench.load import lengths
from tpdet.tools.measurement.results_file import in_default_order, newest_rows
from tpdet.tools.plan.constants import Constants
from tpdet.tools.plan.step import decode_parts, prefill_parts, step_seconds


@dataclass(frozen=True)
class Comparison:
    """A case, measured in fold order `order`, with its measured and predicted value in `unit`."""

    case: str
    tp: int
    order: str
    unit: str
    measured: float
    predicted: float
    commit: str

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.measured - 1


def compare_steps(constants: Constants, found: Sequence[StepFigure]) -> list[Comparison]:
    """Decode steps in ms, prefill in tokens a second."""
    made = []
    for figure in found:
        seconds = predicted_seconds(constants, figure)
        if figure.case == "decode":
            case, unit = f"decode, batch {figure.batch}, context {figure.context}", "ms"
            pair = 1e3 * figure.value, 1e3 * seconds
        else:
            case, unit = f"prefill, {figure.batch} prompts of {figure.context:,}", "tokens/s"
            pair = figure.value, figure.budget / seconds
        made.append(Comparison(case, figure.tp, figure.fold_order, unit, *pair, figure.commit))
    return made


def compare_mixed(constants: Constants, results: Path) -> list[Comparison]:
    """`tpdet bench throughput`: seconds for 256 prompts of 64 to 1,024 tokens, 128 answered each.

    Nothing is fitted to these. Prompts are read in whole steps, then all decode together.
    """
    made = []
    for run, row in in_default_order(newest_rows(results / f"throughput.{constants.gpu}.json")):
        if row["case"] != "mixed":
            continue
        prompts = lengths(row["batch"], 64, row["context"], 0)
        mean = sum(prompts) // len(prompts)
        figure = StepFigure(
            "decode",
            row["model"],
            row["tp"],
            row["batch"],
            mean,
            0.0,
            8192,
            run["commit"],
            None,
            row["mode"],
        )
        world = figure_world(constants, figure)
        reading = step_seconds(prefill_parts(world, mean)) * sum(prompts) / world.budget
        step = step_seconds(decode_parts(world, row["batch"], mean + 64))
        case, seconds = f"mixed, {row['batch']} requests", reading + 127 * step
        made.append(
            Comparison(case, row["tp"], row["mode"], "s", row["value"], seconds, run["commit"])
        )
    return sorted(made, key=lambda comparison: comparison.tp)


def comparison_table(constants: Constants, results: Path) -> list[str]:
    """Lines of Markdown, with a note on cases that were measured only in another fold order."""
    found = compare_steps(constants, step_figures(results, constants.gpu))
    found += compare_mixed(constants, results)
    lines = ["| case | TP | order | measured | predicted | error | commit |"]
    lines.append("|" + "---|" * 7)
    for row in found:
        digits = 0 if row.unit == "tokens/s" else 2
        lines.append(
            f"| {row.case} | {row.tp} | {row.order} | {row.measured:,.{digits}f} {row.unit} | "
            f"{row.predicted:,.{digits}f} | {100 * row.error:+.1f} % | {row.commit} |"
        )
    note = other_orders((row.tp, row.order) for row in found)
    return [*lines, "", note] if note else lines
