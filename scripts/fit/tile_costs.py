"""Fit the costs of tiles on measured times: `python -m scripts.fit.tile_costs TIMES.jsonl ...`.

TIMES are files of `tpdet tune --times`. Each tile's costs are fitted alone, by least squares of
logarithms, with weights that fall for times far from the best of their bucket, and with a wide
prior from the tile's area, so that few times do not lead astray. Printed are the ratios of the
chosen tile's time to the best one's: of all products, and held out, where the products of one
hidden size are chosen by costs that were fitted on the others. Needs scipy (the extra `fit`).
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy
from scipy.optimize import least_squares

from tpdet.kernels.cuda.cost.model import (
    TileCost,
    TileLoad,
    TileWork,
    cost_name,
    costs_path,
    load_microseconds,
    load_of,
)
from tpdet.kernels.cuda.gemm.choice.library import LIBRARIES
from tpdet.kernels.cuda.gemm.choice.tile_text import parse_tile
from tpdet.kernels.cuda.hardware import KNOWN

GPUS = {gpu.name: gpu for gpu in KNOWN.values()}
_SPREAD = TileCost(0.4, 0.35, 0.6, 0.7, 0.7, 0.2, 0.3)
"""How far costs may lie from the prior, in logarithms."""
_NOISE = 0.03  # of a time, likewise
_FALL, _LEAST_WEIGHT = 4, 0.3
"""A time twice the best of its case weighs exp(-4) and this."""
_ROW = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+) (\w+) (.*)")


@dataclass(frozen=True)
class Time:
    """A measured time; `case`: what its rivals share; `hidden`: the model's hidden size."""

    name: str
    work: TileWork
    us: float
    case: tuple[object, ...]
    hidden: int

    @property
    def load(self) -> TileLoad:
        """The load of the GPU that it was measured on."""
        return load_of(GPUS[str(self.case[0])], self.work)


def read_times(paths: Iterable[Path]) -> list[Time]:
    """Times of all tiles of the files, without the libraries'."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [time for line in lines for time in _times_of(line)]


def _times_of(line: Mapping[str, object]) -> Iterator[Time]:
    kind, n, k = str(line["kind"]), int(line["n"]), int(line["k"])  # type: ignore[call-overload]
    for rows, times in line["us"].items():  # type: ignore[attr-defined]
        case = (line["gpu"], kind, n, k, line["leaves"], line["roots"], rows)
        for title, us in times.items():
            if title in LIBRARIES:
                continue
            units, cut, kernel, text = 1, 1, "", title
            if kind == "row":
                units, groups, parts, pair, kernel, text = _ROW.fullmatch(title).groups()
                units, cut = int(units), int(groups) * int(parts) * int(pair)
            work = TileWork(parse_tile(text), kind, int(rows), n, k, units, cut, kernel)
            yield Time(cost_name(work), work, us, case, n if kind == "row" else k)


def fit(times: Iterable[Time]) -> dict[str, TileCost]:
    """Costs by their names, of the tiles with which the choice is best."""
    times = list(times)
    best: dict[tuple[object, ...], float] = {}
    by_name = defaultdict(list)
    for time in times:
        best[time.case] = min(best.get(time.case, math.inf), time.us)
        by_name[time.name].append(time)
    costs = {name: _fit_one(mine, best) for name, mine in sorted(by_name.items())}
    return _without_misleading(costs, times)


def _without_misleading(costs: Mapping[str, TileCost], times: list[Time]) -> dict[str, TileCost]:
    """The costs without tiles that are chosen more often by mistake than to profit.

    One after another goes the tile without which the chosen ones take the least time.
    """
    cases = [rivals for rivals in ranked(costs, times).values() if len(rivals) > 1]
    kept = dict(costs)
    while True:
        gains: dict[str, float] = defaultdict(float)
        for rivals in cases:
            if len(rivals) > 1:
                gains[rivals[0].name] += math.log(rivals[0].us / rivals[1].us)
            else:
                gains[rivals[0].name] = -math.inf  # a case needs a tile
        name = max(gains, key=lambda name: gains[name])
        if gains[name] <= 0:
            return kept
        del kept[name]
        cases = [[time for time in rivals if time.name != name] for rivals in cases]


def ranked(
    costs: Mapping[str, TileCost], times: Iterable[Time]
) -> dict[tuple[object, ...], list[Time]]:
    """The times of each case whose tiles have costs, the least estimate first."""
    cases = defaultdict(list)
    for time in times:
        if time.name in costs:
            cases[time.case].append((load_microseconds(costs[time.name], time.load), time))
    by_estimate = lambda entry: entry[0]
    return {case: [t for _, t in sorted(mine, key=by_estimate)] for case, mine in cases.items()}


def _fit_one(times: list[Time], best: Mapping[tuple[object, ...], float]) -> TileCost:
    prior = numpy.log(_prior(times[0]))
    load = TileLoad(*map(numpy.array, zip(*(time.load for time in times), strict=True)))
    us = numpy.array([time.us for time in times])
    over = us / numpy.array([best[time.case] for time in times]) - 1
    weights = (_LEAST_WEIGHT + numpy.exp(-_FALL * over)) / _NOISE

    def residuals(logs: numpy.ndarray) -> numpy.ndarray:
        errors = weights * numpy.log(
            load_microseconds(TileCost(*numpy.exp(logs)), load, numpy.maximum) / us
        )
        return numpy.concatenate([errors, (logs - prior) / numpy.array(_SPREAD)])

    found = least_squares(residuals, prior, loss="soft_l1", f_scale=2.0, max_nfev=100)
    return TileCost(*(float(f"{value:.4g}") for value in numpy.exp(found.x)))


def _prior(time: Time) -> TileCost:
    """What a tile's area says: operations, loads and an end in proportion."""
    tile, area = time.work.tile, time.work.tile.area / (128 * 256)
    compute = 2 * 128 * 256 * area * tile.depth / (5.9e6 * min(1.0, 0.35 + 0.65 * area))
    load = (tile.rows + tile.columns) * tile.depth * 2 / 65e3
    step = max(compute, load)
    launch = 5.0 if time.work.kind == "row" else 3.0
    return TileCost(
        launch, step, max(step, 0.25 + 0.3 * load), 0.3 + 3 * area, 0.5 + 4 * area, 4.0, 4.5
    )


def ratios(costs: Mapping[str, TileCost], times: Iterable[Time]) -> list[tuple[float, str]]:
    """The chosen tile's time over the best one's in each case, and what it was."""
    times = list(times)
    best: dict[tuple[object, ...], Time] = {}
    for time in times:
        best[time.case] = min(best.get(time.case, time), time, key=lambda each: each.us)
    found = []
    for case, rivals in ranked(costs, times).items():
        chosen, fastest = rivals[0], best[case]
        words = " ".join(map(str, case[1:]))
        found.append((chosen.us / fastest.us, f"{words}: {chosen.name} for {fastest.name}"))
    return found


def show(title: str, found: list[tuple[float, str]], worst: int = 5) -> None:
    """Print the geometric mean, the share within 3 % and the worst cases."""
    mean = math.exp(math.fsum(math.log(ratio) for ratio, _ in found) / len(found))
    within = sum(ratio <= 1.03 for ratio, _ in found) / len(found)
    print(f"{title}: {len(found)} cases, mean {mean:.4f}, within 3 %: {within:.0%}")
    for ratio, words in sorted(found, reverse=True)[:worst]:
        print(f"  {ratio:.3f} {words}")


def main() -> None:
    """Fit, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="default: the file of the GPU measured")
    options = parser.parse_args()
    times = read_times(options.times)
    gpus = {str(time.case[0]) for time in times}
    if len(gpus) != 1 or not gpus <= {*GPUS}:
        parser.error(
            f"times of {', '.join(sorted(gpus)) or 'no GPU'}: give those of one that "
            f"kernels/cuda/hardware.py knows ({', '.join(GPUS)})"
        )
    output = options.output or costs_path(gpus.pop())
    costs = fit(times)
    for kind in ("column", "gated", "head", "row"):
        mine = [time for time in times if time.work.kind == kind]
        if mine:
            show(kind, ratios(costs, mine))
    for hidden in sorted({time.hidden for time in times}):
        rest = fit(time for time in times if time.hidden != hidden)
        show(
            f"held out, hidden size {hidden}",
            ratios(rest, [t for t in times if t.hidden == hidden]),
        )
    data = {"fields": TileCost._fields, "costs": {name: list(cost) for name, cost in costs.items()}}
    output.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    print(f"{len(costs)} costs in {output}")


if __name__ == "__main__":
    main()
