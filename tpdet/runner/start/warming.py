"""What an engine launches before it serves: each size of step, after its kernels were compiled."""

import logging
from collections.abc import Callable
from functools import partial

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.config import EngineConfig
from tpdet.models.decoder import Decoder
from tpdet.models.warm_up import warm_up
from tpdet.runner.graphs.engine_graphs import captures_graphs, make_graphs
from tpdet.runner.start.compile_ahead import CompilingAhead

_log = logging.getLogger("tpdet.engine")


def warm_engine(
    model: Decoder,
    pages: KeyValuePages,
    sampled: torch.Tensor,
    config: EngineConfig,
    context: int,
    logit_rows: int,
    ahead: CompilingAhead,
    sample: Callable[[], None],
) -> int:
    """Run every size of step on `pages`, what graphs will hold compiled as well; collective.

    sampled: ids of the step before, as for `DecodeGraphs`. sample: the ways that ranks sample
    together, each size once. Returns bytes of the GPU for graphs: what
    the largest step took, which those of steps with prompt rows take again, for good.
    """
    limits = config.max_num_seqs, config.max_num_batched_tokens, context, logit_rows

    def rehearse() -> None:
        shallow = model.shallow()
        with shallow.exchange.rehearsal():
            warm_up(shallow, pages, sampled.device, *limits)
            if captures_graphs(config, sampled.device):
                make_graphs(shallow, pages, sampled, config, context, capture=False)
            sample()

    ahead.compile(rehearse, "warm-up")
    _log.info("warming up")
    warm = partial(warm_up, model, pages, sampled.device, *limits)
    sample()
    if captures_graphs(config, sampled.device) and model.attends_in_fixed_shapes:
        return _bytes_taken(warm, sampled.device)
    warm()
    return 0


def _bytes_taken(work: Callable[[], None], device: torch.device) -> int:
    """Run `work`; the most memory of the GPU that it had at once."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before
