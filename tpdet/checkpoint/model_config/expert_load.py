"""How many experts rows choose, and a step touches, in all and on a rank. Needs no torch.

Each row chooses k of E evenly and for itself, as random routers do; real ones touch fewer, and
less evenly.
"""

from math import sqrt

from tpdet.checkpoint.model_config.model import ModelConfig

_LARGEST_OF = {1: 0.0, 2: 0.5642, 4: 1.0294, 8: 1.4236, 16: 1.7660, 32: 2.0697, 64: 2.3438}
"""By a number of standard normal values: the mean of the largest of them."""


def touched_experts(experts: int, chosen: int, rows: int) -> float:
    """Mean number of experts that some row chooses."""
    return float(experts * _taken(experts, chosen, rows))


def fullest_rank(experts: int, chosen: int, rows: int, ranks: int) -> float:
    """Mean number of touched experts on the rank that has most of them, each holding E / ranks.

    As of normal values with the variance of independent experts; within 4 % of a simulation.
    """
    held, taken = experts / ranks, _taken(experts, chosen, rows)
    spread = _LARGEST_OF[ranks] * sqrt(held * taken * (1 - taken))
    return float(min(held, held * taken + spread))


def _taken(experts: int, chosen: int, rows: int) -> float:
    """The probability that an expert is touched."""
    return float(1 - (1 - chosen / experts) ** rows)


def route_shape(model: ModelConfig) -> tuple[int, int]:
    """(layers with experts, experts of a row); (0, 0) for a dense model."""
    if model.mixture is None:
        return 0, 0
    layers = sum(map(model.has_experts, range(model.num_layers)))
    return layers, model.mixture.routing.chosen
