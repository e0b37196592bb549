"""Fits the constants that only whole steps show: small kernels, overlapped exchanges, the host.

They are fitted in this order, each with the constants before it:

1. layer: the rest of decode steps, and of prefill on one rank, without all measured kernels, as
   seconds a layer and bytes that its small kernels move; or as seconds saved, because launches in
   a step are dependent, and launches of kernels timed alone are not;
2. overlapped: from prefill on several ranks, bytes a second that a program of an exchange sends;
3. host: a decode step that takes a quarter longer than its kernels and exchanges is considered to
   wait for rank 0's host, which plans the next step meanwhile; in seconds a row.
"""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from scripts.fit.figures import StepFigure
from tpdet.models.products import layer_products
from tpdet.tools.plan.constants import Constants, FitError, LayerCost, OverlapCost
from tpdet.tools.plan.hardware import Network, hardware_of
from tpdet.tools.plan.kernel_time import layer_bytes
from tpdet.tools.plan.step import PlanWorld, decode_parts, prefill_parts, step_seconds
from tpdet.tools.worlds.shapes import named_config

HOST_BOUND = 1.25
_SHARPNESS = 4.0  # of the smooth maximum of products and an overlapped exchange


def figure_world(constants: Constants, figure: StepFigure) -> PlanWorld:
    """The world in which a figure was measured."""
    return PlanWorld(
        named_config(figure.model),
        figure.tp,
        constants,
        hardware_of(constants.gpu),
        Network(),
        budget=figure.budget,
        fold_order=figure.fold_order,
        overlapped=figure.overlapped,
    )


def predicted_seconds(constants: Constants, figure: StepFigure) -> float:
    """The predicted seconds of the step of a figure."""
    world = figure_world(constants, figure)
    if figure.case == "decode":
        return step_seconds(decode_parts(world, figure.batch, figure.context))
    return step_seconds(prefill_parts(world, figure.context))


def measured_seconds(figure: StepFigure) -> float:
    """The measured seconds of the step of a figure."""
    return figure.value if figure.case == "decode" else figure.budget / figure.value


def fit_steps(constants: Constants, found: Sequence[StepFigure]) -> Constants:
    """`constants` with the three that are fitted here, and with the errors of whole steps."""
    waiting = [figure for figure in found if _waits(constants, figure)]
    steady = [figure for figure in found if figure not in waiting]
    constants = replace(constants, layer=_fit_layer(constants, steady))
    constants = replace(constants, overlapped=_fit_overlap(constants, steady))
    # Only steps that wait for the host show its time for a row; others show an upper bound.
    host = max((f.value / f.batch for f in waiting), default=0.0)
    constants = replace(constants, host=host)
    errors = dict(constants.errors)
    for case in ("decode", "prefill"):
        mine = [f for f in found if f.case == case]
        relative = [predicted_seconds(constants, f) / measured_seconds(f) - 1 for f in mine]
        worst = max(relative, key=abs, default=0.0)
        rms = float(np.sqrt(np.mean(np.square(relative)))) if relative else 0.0
        errors[f"{case} steps"] = FitError(len(relative), rms, worst)
    return replace(constants, errors=errors)


def _waits(constants: Constants, figure: StepFigure) -> bool:
    if figure.case != "decode":
        return False
    return figure.value > HOST_BOUND * predicted_seconds(constants, figure)


def _fit_layer(constants: Constants, found: Sequence[StepFigure]) -> LayerCost:
    from scipy.optimize import lsq_linear

    terms, left = [], []
    for figure in found:
        if figure.case == "prefill" and figure.tp > 1:
            continue
        world, measured = figure_world(constants, figure), measured_seconds(figure)
        layers = world.config.num_layers
        rows = figure.batch if figure.case == "decode" else figure.budget
        # In terabytes: the solver wants numbers of one size.
        moved = layer_bytes(rows, layer_products(world.partition)) / 1e12
        terms.append([layers / measured, layers * moved / measured])
        left.append(1 - predicted_seconds(constants, figure) / measured)
    bounds = [-np.inf, 0.0], [np.inf, np.inf]
    seconds, each = lsq_linear(np.array(terms), np.array(left), bounds).x
    rate = 1e12 / max(float(each), 1e-6)
    return LayerCost(max(float(seconds), 0.0), rate, saved=max(-float(seconds), 0.0))


def _fit_overlap(constants: Constants, found: Sequence[StepFigure]) -> OverlapCost:
    from scipy.optimize import minimize_scalar

    mine = [figure for figure in found if figure.case == "prefill" and figure.tp > 1]

    def distance(log_rate: float) -> float:
        trial = replace(constants, overlapped=OverlapCost(float(np.exp(log_rate)), _SHARPNESS))
        return sum(
            float(np.log(predicted_seconds(trial, figure) / measured_seconds(figure))) ** 2
            for figure in mine
        )

    bounds = (np.log(1e9), np.log(1e11))
    best = minimize_scalar(distance, bounds=bounds, method="bounded").x
    return OverlapCost(float(np.exp(best)), _SHARPNESS)
