"""What a start will launch on a GPU, done once for its kernels to be recorded; nothing is judged.

`tpdet compile` runs the same two functions for a GPU that is not there.
"""

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.config import EngineConfig
from tpdet.control.plan import MAX_STEP_DRAFTS
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.known.answers import Forms, known_answers
from tpdet.layers.partition import Partition
from tpdet.models.decoder import Decoder
from tpdet.models.products import expert_layer, expert_products, rank_products
from tpdet.models.warm_up import warm_up
from tpdet.runner.graphs.engine_graphs import make_graphs
from tpdet.runner.step.shared_rows import RowSharing


def rehearse_checks(
    partition: Partition, device: torch.device, limits: dict[str, int] | None
) -> None:
    """Launch what the known answers and, with `limits`, `admit_products` launch."""
    from tpdet.kernels.cuda.experts.admission import failing_tiles
    from tpdet.kernels.cuda.gemm import admission

    dtype = getattr(torch, partition.config.dtype)
    known_answers(device, dtype, forms_of(partition.config))
    if limits is not None:
        failing_tiles(expert_products(partition), expert_layer(partition), device, dtype)
        admission.rehearse(rank_products(partition), device, limits, dtype)


def forms_of(model: ModelConfig) -> Forms:
    """The forms of kernels that a model takes."""
    caps = model.attention_cap, model.logit_cap
    return Forms(model.activation, model.norm, *caps, model.sinks)


def rehearse_steps(
    model: Decoder,
    pages: KeyValuePages,
    sampled: torch.Tensor,
    sharing: RowSharing,
    config: EngineConfig,
    most: int,
    context: int,
    graphs: bool,
) -> None:
    """Launch every size of step, and with `graphs` what they will hold, on `pages_needed` pages.

    sampled: ids int64 of the step before; most: tokens of a step; context: of a sequence.
    """
    shallow, device = model.shallow(), sampled.device
    with shallow.exchange.carrier.rehearsal():
        warm_up(shallow, shallow, pages, device, *step_limits(config, most, context))
        if graphs:
            make_graphs(shallow, pages, sampled, config, most, context, capture=False)
        sharing.warm_up(device)


def room_for_samples(config: EngineConfig, device: torch.device) -> torch.Tensor:
    """Zeros int64 for the ids that a step samples, at most: a token a row, and one a draft."""
    return torch.zeros(config.max_num_seqs + MAX_STEP_DRAFTS, dtype=torch.int64, device=device)


def step_limits(config: EngineConfig, most: int, context: int) -> tuple[int, int, int, int]:
    """The last arguments of `warm_up`: sequences, tokens, context and rows of logits, at most."""
    return config.max_num_seqs, most, context, HEAD_ROWS
