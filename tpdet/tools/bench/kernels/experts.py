"""`tpdet bench experts`: a layer's experts on one rank, from the router's logits to their sums.

CUDA graphs over steps with other routes: choice, places, both products, lanes. Experts are timed
whole on ranks and cut over all ranks; gathers and exchanges between ranks, and a shared expert, are
not. Routes are drawn: every expert alike, or low ids more often (`--skew`), as in Zipf's law: those
of rank 0, which is the fullest then.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.model import Mixture
from tpdet.errors import UsageError
from tpdet.kernels import ops
from tpdet.kernels.inputs.experts import Lanes
from tpdet.kernels.inputs.paged_batch import PagedBatch, PagedSequence, make_batch
from tpdet.kernels.order import PAGE_TOKENS, fold_tree
from tpdet.kernels.partial_sums import relative_roots
from tpdet.layers.experts import held_experts, held_outputs
from tpdet.layers.partition import Partition
from tpdet.tools.bench.kernels.gpu import gpu_only, random_values, this_gpu
from tpdet.tools.measurement.floor import CaseWork, print_floor
from tpdet.tools.measurement.graph_times import times_us
from tpdet.tools.measurement.rows import BenchRow, finish, kernel_row
from tpdet.tools.worlds.lists import parse_sizes
from tpdet.tools.worlds.shapes import cut_for, find_model

_STEPS = {16: 12, 256: 6, 1 << 30: 2}  # steps with different routes, by the most rows
_SCALE = 0.02


class Touched(NamedTuple):
    """Experts that a step touches in all, on rank 0, and on the fullest rank; choices on rank 0,
    and on the rank that has most of them."""

    every: float
    here: float
    fullest: float
    choices: float
    most_choices: float


class ExpertsStep(NamedTuple):
    """Normed rows [M, H] and their router's logits [M, E] fp32."""

    x: torch.Tensor
    logits: torch.Tensor


def experts_command(options: argparse.Namespace) -> int:
    """Every model, size, placement and number of rows."""
    gpu_only("experts")
    cases: list[BenchRow] = []
    for name in options.model_shape.split(","):
        config = find_model(name)
        if config.mixture is None:
            raise UsageError(f"{name} has no experts: name a mixture, such as qwen3-30b-a3b")
        for ranks in parse_sizes(options.tp):
            for placed in ("lanes", "columns") if ranks > 1 else ("lanes",):
                partition = cut_for(config, ranks, options.fold_order, experts=placed)
                run = _layer(partition)
                for rows in parse_sizes(options.rows):
                    cases.append(_case(name, partition, placed, run, rows, options))
                del run
                torch.cuda.empty_cache()
    return finish("experts", this_gpu(), cases, options.output, as_json=options.json)


def _case(
    name: str,
    partition: Partition,
    placed: str,
    run: Callable[[ExpertsStep, PagedBatch], object],
    rows: int,
    options: argparse.Namespace,
) -> BenchRow:
    config, ranks, mixture = partition.config, partition.world.size, _mixture(partition.config)
    count = next(steps for most, steps in _STEPS.items() if rows <= most)
    steps = [_step(config, rows, options.skew, seed) for seed in range(count)]
    batch = _batch(rows, steps[0].x.device)
    touched = [_touched(partition, step, batch, placed) for step in steps]
    mean = Touched(*(sum(part) / count for part in zip(*touched, strict=True)))
    share, load = mean.fullest / mean.every, mean.most_choices / (rows * mixture.routing.chosen)
    width, outputs = map(len, held_outputs(partition))
    weights = 2 * width * config.hidden_size + outputs * mixture.width
    work = CaseWork(2.0 * mean.choices * weights, 2.0 * mean.here * weights)
    floor = print_floor(f"{name} experts {placed}, TP {ranks}, {rows} rows", work)
    print(
        f"  {mean.every:.1f} experts touched; the fullest rank has {share:.2f} of them, and one "
        f"takes {load:.2f} of the choices",
        flush=True,
    )
    (value,) = times_us([lambda step: run(step, batch)], steps, options.repeats)
    metrics = {
        "experts_touched": round(mean.every, 2),
        "touched_on_this_rank": round(mean.here, 2),
        "fullest_rank": round(mean.fullest, 2),
        "fullest_share": round(share, 4),
        "fullest_load": round(load, 4),
        "skew": options.skew,
    }
    case = {"model": name, "tp": ranks, "batch": rows, "mode": placed, "metrics": metrics}
    skewed = f", skew {options.skew:g}" if options.skew else ""
    return kernel_row(f"experts of a layer{skewed}", value, floor, None, work, **case)


def _layer(partition: Partition) -> Callable[[ExpertsStep, PagedBatch], object]:
    """What a rank runs for one layer, on weights that are drawn here."""
    config, mixture = partition.config, _mixture(partition.config)
    experts, (width, outputs) = held_experts(partition), map(len, held_outputs(partition))
    hidden, routing, total = config.hidden_size, mixture.routing, mixture.routing.experts

    def drawn(*shape: int, seed: int) -> torch.Tensor:
        flat = random_values(shape[0], shape[1] * (shape[2] if shape[2:] else 1), seed=seed)
        return (flat * _SCALE).view(shape)

    gate_up = drawn(len(experts), 2 * width, hidden, seed=1)
    down = drawn(len(experts), outputs, mixture.width, seed=2)
    shifts: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    if mixture.biased:
        shifts = drawn(len(experts), 2 * width, seed=3), drawn(len(experts), outputs, seed=4)
    bias = drawn(1, total, seed=5)[0].float() if mixture.choice_bias else None
    if partition.experts is None:
        roots = relative_roots(partition.plan.roots[0])
        lanes = Lanes(experts, total, len(partition.mine), roots)

        def whole(step: ExpertsStep, batch: PagedBatch) -> object:
            ids, weights, tokens = ops.choose_experts(step.logits, bias, batch, routing, experts)
            of = step.x, ids, weights, gate_up, down, shifts, lanes
            return ops.expert_sums(*of, activation=mixture.activation, sorted_tokens=tokens)

        return whole
    root = fold_tree(partition.fold_order, partition.leaves)
    lanes = Lanes(experts, total, partition.leaves, (root,))
    gathered: dict[int, torch.Tensor] = {}

    def cut(step: ExpertsStep, batch: PagedBatch) -> object:
        ids, weights, _ = ops.choose_experts(step.logits, bias, batch, routing)
        of = gate_up, shifts[0], experts, total, mixture.activation
        mixed = ops.expert_rows(step.x, ids, *of)
        rows = len(step.x)
        if rows not in gathered:  # as if other ranks' columns had come
            gathered[rows] = mixed.repeat(1, 1, partition.world.size)
        return ops.sums_of_rows(gathered[rows], ids, weights, down, shifts[1], lanes)

    return cut


def _step(config: ModelConfig, rows: int, skew: float, seed: int) -> ExpertsStep:
    experts = config.experts
    normal = random_values(rows, experts, seed=100 + seed, dtype=torch.float32)
    return ExpertsStep(
        random_values(rows, config.hidden_size, seed=seed), skewed_logits(normal, skew)
    )


def skewed_logits(normal: torch.Tensor, skew: float) -> torch.Tensor:
    """Logits [M, E] whose best are drawn one after another with odds (1 + i) ** -skew of expert i.

    normal: normal values fp32, which become Gumbel's.
    """
    below = torch.special.ndtr(normal.double())
    odds = torch.arange(1, normal.shape[1] + 1, device=normal.device).double().log()
    return (-(-below.log()).log() - skew * odds).float()


def _batch(rows: int, device: torch.device) -> PagedBatch:
    """One prompt of `rows` rows; the choice reads which rows are there."""
    pages = tuple(range(-(-rows // PAGE_TOKENS)))
    return make_batch((PagedSequence(0, rows, 0, pages),), device)


def _touched(partition: Partition, step: ExpertsStep, batch: PagedBatch, placed: str) -> Touched:
    routing = _mixture(partition.config).routing
    ids, _, _ = ops.choose_experts(step.logits, None, batch, routing)
    counts = torch.bincount(ids.flatten().long(), minlength=routing.experts).tolist()
    own = routing.experts // (1 if placed == "columns" else partition.world.size)
    by_rank = [counts[i : i + own] for i in range(0, routing.experts, own)]
    touched = [sum(map(bool, part)) for part in by_rank]
    choices = [sum(part) for part in by_rank]
    return Touched(sum(touched), touched[0], max(touched), choices[0], max(choices))


def _mixture(config: ModelConfig) -> Mixture:
    assert config.mixture is not None  # `experts_command` has asked
    return config.mixture
