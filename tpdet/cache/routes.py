"""Which experts each cached position chose: kept beside the keys and values of its page.

A layer of experts writes the ids of a step's rows where attention writes their keys, so that
chunks, preemptions, wrong drafts and graphs need nothing of their own.
"""

from collections import abc

import torch

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.expert_load import route_shape
from tpdet.kernels.order import PAGE_TOKENS

ROUTE_DTYPE = torch.int16  # `MAX_EXPERTS` fit


def route_bytes(model: ModelConfig) -> int:
    """Bytes of one page's expert ids."""
    layers, chosen = route_shape(model)
    return PAGE_TOKENS * layers * chosen * ROUTE_DTYPE.itemsize


class Routes:
    """Expert ids int16 [layers, 256 * pages, k]; a page's are undefined until they are written."""

    def __init__(self, model: ModelConfig, pages: int, device: torch.device) -> None:
        layers, chosen = route_shape(model)
        shape = layers, pages * PAGE_TOKENS, chosen
        self.layers = torch.zeros(shape, dtype=ROUTE_DTYPE, device=device)

    def read(self, pages: abc.Sequence[int], count: int) -> bytes:
        """The first `count` positions of a sequence on these pages: int16 [count, layers, k].

        It waits for the GPU.
        """
        positions = torch.arange(count)
        page_ids = torch.tensor([*pages], dtype=torch.int64)[positions // PAGE_TOKENS]
        slots = (page_ids * PAGE_TOKENS + positions % PAGE_TOKENS).to(self.layers.device)
        expert_ids = self.layers[:, slots].permute(1, 0, 2).contiguous().cpu()
        return expert_ids.numpy().tobytes()
