"""What an engine launches before it serves: each size of step, after its kernels were compiled."""

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.config import EngineConfig
from tpdet.models.decoder import Decoder
from tpdet.models.warm_up import warm_up
from tpdet.runner.compile_ahead import CompilingAhead
from tpdet.runner.decode_graphs import captures_graphs, make_graphs


def warm_engine(
    model: Decoder,
    pages: KeyValuePages,
    drawn: torch.Tensor,
    config: EngineConfig,
    context: int,
    logit_rows: int,
    ahead: CompilingAhead,
) -> None:
    """Run every size of step on `pages`, what graphs will hold compiled as well; collective.

    drawn: ids of the step before, as for `DecodeGraphs`.
    """
    limits = config.max_num_seqs, config.max_num_batched_tokens, context, logit_rows

    def rehearse() -> None:
        shallow = model.shallow()
        with shallow.exchange.rehearsal():
            warm_up(shallow, pages, drawn.device, *limits)
            if captures_graphs(config, drawn.device):
                make_graphs(shallow, pages, drawn, config, context, capture=False)

    ahead.compile(rehearse, "warm-up")
    warm_up(model, pages, drawn.device, *limits)
