"""Which experts each cached position chose: kept beside the keys and values of its page.

A layer of experts writes the ids of a step's rows where attention writes their keys, so that
chunks, preemptions, wrong drafts and graphs need nothing of their own.
"""

from collections.abc import Sequence

import torch

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.expert_load import route_shape
from tpdet.kernels.order import PAGE_TOKENS

ROUTE_DTYPE = torch.int16  # `MAX_EXPERTS` fit


def route_bytes(model: ModelConfig) -> int:
    """Bytes of one page."""
    layers, chosen = route_shape(model)
    return PAGE_TOKENS * layers * chosen * ROUTE_DTYPE.itemsize


class Routes:
    """Ids int16 [layers, 256 * pages, k]; what a page holds is undefined until it is written."""

    def __init__(self, model: ModelConfig, pages: int, device: torch.device) -> None:
        layers, chosen = route_shape(model)
        shape = layers, pages * PAGE_TOKENS, chosen
        self.layers = torch.zeros(shape, dtype=ROUTE_DTYPE, device=device)

    def read(self, pages: Sequence[int], count: int) -> bytes:
        """The first `count` positions of a sequence on these pages: int16 [count, layers, k].

        It waits for the GPU.
        """
        places = torch.arange(count)
        of_page = torch.tensor([*pages], dtype=torch.int64)[places // PAGE_TOKENS]
        slots = (of_page * PAGE_TOKENS + places % PAGE_TOKENS).to(self.layers.device)
        found = self.layers[:, slots].permute(1, 0, 2).contiguous().cpu()
        return found.numpy().tobytes()
