"""The warm-up: every size of step is launched once, after its kernels were compiled."""

import logging
from collections.abc import Callable
from functools import partial

import torch

from tpdet.models.warm_up import pages_needed, warm_up
from tpdet.runner.graphs.engine_graphs import bytes_for_drafts, captures_graphs
from tpdet.runner.start.loaded_model import LoadedModel
from tpdet.runner.start.rehearsal import rehearse_steps, step_limits
from tpdet.runner.start.start_times import LOADING, TRYING

_log = logging.getLogger("tpdet.engine")


def warm_engine(loaded: LoadedModel, weights_there: Callable[[], None]) -> int:
    """Run every size of step, and what graphs will hold, on pages made for it; collective.

    weights_there: waits for them; called when all kernels are compiled. Returns bytes of the GPU
    for graphs: what the largest step took, which the graphs of steps with prompt rows take again,
    for good; and those of steps with drafts.
    """
    config, context, model = loaded.config, loaded.max_model_len, loaded.decoder
    device, sampled, most = loaded.device, loaded.sampled, loaded.step_tokens.most
    pages = loaded.allocate_pages(pages_needed(most, context))
    graphs = captures_graphs(config, device)
    of = model, pages, sampled, loaded.sharing, config, most, context, graphs
    loaded.ahead.compile(lambda: rehearse_steps(*of), "warm-up")
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
