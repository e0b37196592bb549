"""What a start launches on a GPU: rehearsed, for its kernels to be compiled, and then run once.

Nothing is judged by either. `tpdet compile` rehearses the same for a GPU that is not there.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.cache.state_table import StateRoom
from tpdet.config import EngineConfig
from tpdet.control.plan import MAX_STEP_DRAFTS
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.known.answers import Forms, known_answers
from tpdet.layers.experts import shared_form
from tpdet.layers.partition import Partition, state_shape
from tpdet.models.decoder import Decoder
from tpdet.models.products import expert_layer, expert_products, table_products
from tpdet.models.warm_up import pages_needed, warm_up
from tpdet.runner.graphs.engine_graphs import bytes_for_drafts, captures_graphs, make_graphs
from tpdet.runner.start.start_times import LOADING, TRYING
from tpdet.runner.step.shared_rows import RowSharing

if TYPE_CHECKING:
    from tpdet.runner.start.loaded_model import LoadedModel

FEWEST_STATES = StateRoom(1, 0)
"""Slots of states that all steps of a rehearsal share."""

_log = logging.getLogger("tpdet.engine")


def rehearse_checks(
    partition: Partition, device: torch.device, limits: dict[str, int] | None
) -> None:
    """Launch what the known answers and, with `limits`, trials of products and of forms launch."""
    from tpdet.kernels.cuda.experts.admission import failing_tiles
    from tpdet.kernels.cuda.experts.lane_admission import failing_lanes
    from tpdet.kernels.cuda.gemm import admission

    dtype = getattr(torch, partition.config.dtype)
    known_answers(device, dtype, forms_of(partition))
    if limits is not None:
        failing_tiles(expert_products(partition), expert_layer(partition), device, dtype)
        failing_lanes(shared_form(partition), device, dtype)
        admission.rehearse(table_products(partition), device, limits, dtype)
        try_linear_forms(partition, device)


def try_linear_forms(partition: Partition, device: torch.device) -> tuple[list[str], list[str]]:
    """The forms of linear layers that were kept, and what was wrong with each of the others."""
    from tpdet.kernels.cuda.linear.admission import admit_forms

    shape = state_shape(partition)
    if shape is None or partition.config.dtype != "bfloat16":
        return [], []
    heads = shape.key_heads, shape.value_heads, shape.key_size, shape.value_size
    return admit_forms(heads, device)


def forms_of(partition: Partition) -> Forms:
    """The forms of kernels that a model takes."""
    model = partition.config
    caps, fp8 = (model.attention_cap, model.logit_cap), partition.kv_cache_dtype == "fp8"
    return Forms(model.activation, model.norm, *caps, model.sinks, model.linear is not None, fp8)


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


def step_limits(config: EngineConfig, most: int, context: int) -> tuple[int, int, int, int, bool]:
    """The last arguments of `warm_up`: sequences, tokens, context and rows of logits, at most.

    Also whether log-probabilities are processed.
    """
    return config.max_num_seqs, most, context, HEAD_ROWS, config.processes_logprobs


def warm_engine(loaded: "LoadedModel", weights_there: Callable[[], None]) -> int:
    """Run every size of step, and what graphs will hold, on pages made for it; collective.

    weights_there: waits for them; called when all kernels are compiled. Returns bytes of the GPU
    for graphs: what the largest step took, which the graphs of steps with prompt rows take again,
    for good; and those of steps with drafts.
    """
    config, context, model = loaded.config, loaded.max_model_len, loaded.decoder
    device, sampled, most = loaded.device, loaded.sampled, loaded.step_tokens.most
    pages = loaded.allocate_pages(pages_needed(most, context), FEWEST_STATES)
    graphs = captures_graphs(config, device)
    steps = model, pages, sampled, loaded.sharing, config, most, context, graphs
    loaded.ahead.compile(lambda: rehearse_steps(*steps), "warm-up")
    loaded.times.doing = LOADING
    weights_there()
    torch.cuda.empty_cache()  # of what the load took meanwhile, so that pages get it
    loaded.times.mark("load")
    loaded.times.doing = TRYING
    _log.info("warming up")
    limits = step_limits(config, most, context)
    warm = partial(warm_up, model, model.shallow(), pages, device, *limits)
    loaded.sharing.warm_up(device)
    if graphs and model.attends_in_fixed_shapes:
        columns = -(-loaded.model_config.vocab_size // loaded.world.size)
        return _bytes_taken(warm, device) + bytes_for_drafts(config, context, columns)
    warm()
    return 0


def _bytes_taken(work: Callable[[], None], device: torch.device) -> int:
    """Run `work`; the most memory of the GPU that it had at once."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before
