"""What happens to a step's logits on a rank, and the ids that are sampled from them."""

from typing import NamedTuple, Protocol

import torch

from tpdet.runner.step.shared_rows import SampleTogether


class LogitBlock(NamedTuple):
    """Logits fp32 [n, W], n <= 256, of which the first are those of the step's row `first`.

    Without `together` the rows are whole and rank 0 samples. With it they are this rank's columns,
    and all ranks sample by calling it. moved: by how many positions the step before moves the
    tokens behind these logits, int64 [n] on the device; None: by none.
    """

    first: int
    logits: torch.Tensor
    together: SampleTogether | None
    moved: torch.Tensor | None = None


class TakeLogits(Protocol):
    """Takes a step's logits and launches the sampling; nothing waits for it."""

    def take(self, block: LogitBlock) -> torch.Tensor:
        """The ids int64 [n'] of the sampled tokens, in the order of their rows, on the device."""


class Follower:
    """Takes the logits of a rank above 0, which helps to sample and keeps no results."""

    def __init__(self, samples: int) -> None:
        """samples: tokens that the step samples."""
        self._samples = samples

    def take(self, block: LogitBlock) -> torch.Tensor:
        """This rank's part; of whole rows zeros for all of the step: rank 0's ids replace them."""
        if block.together is not None:
            return block.together(block.first, block.logits, block.moved).tokens
        count = self._samples if block.first == 0 else 0
        return torch.zeros(count, dtype=torch.int64, device=block.logits.device)
