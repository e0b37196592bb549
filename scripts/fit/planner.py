"""Fits the planner's constants to measured figures and writes them.

    python -m scripts.fit.planner [--gpu h200] [--results docs/results] [--output FILE]

Each kernel's formula is fitted to that kernel's figures alone, by least squares of relative errors.
The rest of a layer is then fitted to whole steps; last come the rate of an exchange that overlaps
products, and the host's time. Needs scipy.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np

from scripts.fit import figures
from scripts.fit.figures import EXPERTS_CASE, LINEAR_CASE, LINEAR_MODEL
from scripts.fit.steps import fit_steps
from tpdet.errors import UsageError
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, DEFAULT_LEAVES, fold_plan
from tpdet.layers.partition import state_shape
from tpdet.models.products import layer_products
from tpdet.tools.measurement.floor import sent_bytes
from tpdet.tools.plan.constants import (
    EXPERTS,
    FOLDER,
    FORMAT,
    Constants,
    DecodeAttentionCost,
    ExchangeCost,
    FitError,
    LayerCost,
    LinearCost,
    MeasuredFile,
    OverlapCost,
    PrefillAttentionCost,
    ProductCost,
    SamplingCost,
)
from tpdet.tools.plan.hardware import hardware_of
from tpdet.tools.plan.kernel_time import (
    decode_attention_work,
    experts_work,
    linear_decode_work,
    linear_prefill_work,
    product_work,
)
from tpdet.tools.worlds.shapes import cut_for, named_config

_HIDDEN = 4096  # of the measured exchanges
_TIMED_ORDER = "pairs"  # of the measured exchanges (scripts/gpu_times/exchange/peer.py)
_HEADS, _KEY_HEADS, _HEAD_DIM = 32, 8, 128  # of the measured attention
_VOCABULARY = 151_936  # of the measured sampling
_SHORT_ROWS = 64  # exchanges of at most this many rows give NCCL's latency
_NEVER = 1e30  # a rate so high that its term vanishes


def fit_constants(results: Path, table: Path, gpu: str) -> Constants:
    """The constants of a GPU. Raises UsageError where figures are missing."""
    errors: dict[str, FitError] = {}
    attention = _fit_decode_attention(results, gpu, errors)
    first = Constants(
        format=FORMAT,
        gpu=gpu,
        sources=_sources(results, table, gpu),
        products=_fit_products(table, errors) | {EXPERTS: _fit_experts(results, gpu, errors)},
        decode_attention=attention,
        prefill_attention=_fit_prefill_attention(results, gpu, errors),
        **_fit_exchanges(results, gpu, errors),
        sampling=_fit_sampling(results, gpu, errors),
        layer=LayerCost(0.0, _NEVER),
        overlapped=OverlapCost(_NEVER, 4.0),
        host=0.0,
        errors=errors,
        linear=fit_linear(results, gpu, errors),
    )
    return fit_steps(first, figures.step_figures(results, gpu))


def _sources(results: Path, table: Path, gpu: str) -> tuple[MeasuredFile, ...]:
    files = [results / f"{name}.{gpu}.json" for name in ("kernels", "allreduce", "latency")]
    named = [MeasuredFile(f"docs/results/{path.name}", figures.commits(path)) for path in files]
    experts = figures.experts_file(results, gpu)
    of_experts = MeasuredFile(
        f"docs/results/{experts.name}", figures.commits(experts, EXPERTS_CASE)
    )
    linear = figures.linear_file(results, gpu)
    used = figures.linear_figures(results, gpu) and figures.commits(linear, LINEAR_CASE.pattern)
    of_linear = [MeasuredFile(f"docs/results/{linear.name}", used)] if used else []
    table_file = MeasuredFile(figures.SHAPE_TABLE.format(gpu=gpu), ())
    return (table_file, *named, of_experts, *of_linear)


def positive_fit(
    terms: Sequence[Sequence[float]], us: Sequence[float]
) -> tuple[list[float], FitError]:
    """Coefficients >= 0 (seconds) of a sum of terms, by least squares of the relative error."""
    from scipy.optimize import nnls

    if not us:
        raise UsageError("no figures to fit: measure them first (tpdet bench, scripts/gpu_times)")
    wanted = 1e-6 * np.array(us)
    matrix = np.array(terms, dtype=float) / wanted[:, None]
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    found = nnls(matrix / scale, np.ones(len(us)))[0] / scale
    return [float(value) for value in found], _error(matrix @ found - 1)


def _error(relative: np.ndarray) -> FitError:
    worst = float(relative[np.abs(relative).argmax()])
    return FitError(len(relative), float(np.sqrt((relative**2).mean())), worst)


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 1 / _NEVER else _NEVER


def _fit_products(table: Path, errors: dict[str, FitError]) -> dict[str, ProductCost]:
    """The cost of each kind of product."""
    costs = {}
    found = figures.product_figures(table)
    for kind in dict.fromkeys(figure.kind for figure in found):
        mine = [figure for figure in found if figure.kind == kind]
        works = [product_work(kind, f.rows, f.n, f.k, f.roots) for f in mine]
        costs[kind], errors[f"{kind} product"] = _fit_product(works, [f.us for f in mine])
    return costs


def _fit_experts(results: Path, gpu: str, errors: dict[str, FitError]) -> ProductCost:
    """The cost of a layer's experts, from the router's logits to the sum of their lanes."""
    found = figures.expert_figures(results, gpu)
    works = []
    for shape, rows, _ in found:
        config = named_config(shape)
        products = layer_products(cut_for(config, 1, DEFAULT_FOLD_ORDER))
        experts = [each for each in products if each.experts]
        works.append(experts_work(experts, config.experts, rows))
    cost, errors[EXPERTS] = _fit_product(works, [us for *_, us in found])
    return cost


def _fit_product(
    works: Sequence[tuple[float, float, float]], us: Sequence[float]
) -> tuple[ProductCost, FitError]:
    """Five numbers, fitted in logarithms, so that all are positive."""
    from scipy.optimize import least_squares

    wanted = 1e-6 * np.array(us)

    def predicted(logs: np.ndarray) -> np.ndarray:
        cost = ProductCost(*(float(value) for value in np.exp(logs)))
        return np.array([cost.seconds(work) for work in works])

    def residual(logs: np.ndarray) -> np.ndarray:
        return np.log(predicted(logs) / wanted)

    begin = np.log([5e-6, 4e12, 8e14, 3.0, 4e12])
    low, high = np.log([1e-7, 1e12, 1e14, 1.0, 1e11]), np.log([5e-5, 6e12, 2e15, 16.0, 1e15])
    best = least_squares(residual, begin, bounds=(low, high)).x
    return ProductCost(*(float(value) for value in np.exp(best))), _error(
        predicted(best) / wanted - 1
    )


def _fit_decode_attention(
    results: Path, gpu: str, errors: dict[str, FitError]
) -> DecodeAttentionCost:
    found = figures.decode_attention_figures(results, gpu)
    terms = [
        (1.0, *decode_attention_work(batch, context, _KEY_HEADS, _HEAD_DIM))
        for batch, context, _ in found
    ]
    (launch, cached, head, split), errors["decode attention"] = positive_fit(
        terms, [us for *_, us in found]
    )
    return DecodeAttentionCost(launch, _rate(cached), head, split)


def _fit_prefill_attention(
    results: Path, gpu: str, errors: dict[str, FitError]
) -> PrefillAttentionCost:
    found = figures.prefill_attention_figures(results, gpu)
    terms = [
        (1.0, prompts * 4 * _HEADS * _HEAD_DIM * tokens * tokens / 2)
        for prompts, tokens, _ in found
    ]
    (launch, flops), errors["prefill attention"] = positive_fit(terms, [us for *_, us in found])
    return PrefillAttentionCost(launch, _rate(flops))


def fit_linear(results: Path, gpu: str, errors: dict[str, FitError]) -> LinearCost | None:
    """The cost of linear attention; None where it was not measured."""
    measured = figures.linear_figures(results, gpu)
    if not measured:
        return None
    config, terms = named_config(LINEAR_MODEL), []
    for figure in measured:
        shape = state_shape(cut_for(config, figure.tp, DEFAULT_FOLD_ORDER))
        assert shape is not None
        sizes = shape, figure.batch, figure.context, hardware_of(gpu).multiprocessors
        work = linear_decode_work(*sizes[:2]) if figure.decode else linear_prefill_work(*sizes)
        terms.append((1.0, *work))
    (launch, states, rows, chunk), errors["linear attention"] = positive_fit(
        terms, [figure.us for figure in measured]
    )
    return LinearCost(launch, _rate(states), _rate(rows), chunk)


def _fit_exchanges(results: Path, gpu: str, errors: dict[str, FitError]) -> dict[str, ExchangeCost]:
    """Costs of both kernels over peer memory, and of NCCL's all-gather of few rows."""
    rows = figures.exchange_rows(results, gpu)
    costs: dict[str, ExchangeCost] = {}
    for name, way in (("one_shot", "one-shot"), ("two_shot", "two-shot"), ("library_gather", "")):
        terms, us = [], []
        for row in rows:
            ranks, batch = row["tp"], row["batch"]
            slots = fold_plan(_TIMED_ORDER, DEFAULT_LEAVES, ranks).slots
            one, two = sent_bytes(ranks, slots, batch * _HIDDEN)
            if way and row["mode"].startswith(way):
                terms.append((1.0, ranks - 1.0, one if way == "one-shot" else two))
                us.append(row["value"])
            elif not way and "gather" in row and batch <= _SHORT_ROWS:
                terms.append((1.0, ranks - 1.0, one))
                us.append(row["gather"])
        (launch, peer, sent), errors[name.replace("_", "-")] = positive_fit(terms, us)
        costs[name] = ExchangeCost(launch, peer, _rate(sent))
    return costs


def _fit_sampling(results: Path, gpu: str, errors: dict[str, FitError]) -> SamplingCost:
    found = figures.sampling_figures(results, gpu)
    terms = [(1.0, float(ranks > 1), rows * _VOCABULARY // ranks * 4.0) for ranks, rows, _ in found]
    (launch, ranks, read), errors["sampling"] = positive_fit(terms, [us for *_, us in found])
    return SamplingCost(launch, ranks, _rate(read))


def write_constants(constants: Constants, path: Path) -> None:
    """Write indented JSON with numbers of six digits; further digits are noise."""
    rounded = _rounded(msgspec.to_builtins(constants))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rounded), indent=1) + b"\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit the constants, write them, and print the errors."""
    parser = argparse.ArgumentParser(prog="scripts.fit.planner", description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    parser.add_argument("--table", type=Path, help="shape table; the package's own if none")
    parser.add_argument("--output", type=Path, help="the package's own if none")
    options = parser.parse_args(arguments)
    if find_spec("scipy") is None:
        raise UsageError("fitting needs scipy: pip install 'tpdet[fit]'")
    table = options.table or Path(figures.SHAPE_TABLE.format(gpu=options.gpu))
    constants = fit_constants(options.results, table, options.gpu)
    path = options.output or FOLDER / f"{options.gpu}.json"
    write_constants(constants, path)
    for name, error in constants.errors.items():
        print(f"{name}: {error.figures} figures, rms {error.rms:.1%}, worst {error.worst:+.1%}")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
