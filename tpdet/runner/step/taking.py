"""What happens to a step's logits on this rank, and the token ids that come of it."""

from typing import Protocol

import torch

from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.runner.step.shared_rows import SharedRows
from tpdet.sampling.sampler import sample_likeliest


class TakeLogits(Protocol):
    """Takes a step's logits where they lie and launches the sampling; nothing waits for it."""

    def take(self, first: int, logits: torch.Tensor) -> torch.Tensor:
        """A block of whole rows, fp32 [<= 256, V], the first of them the step's row `first`.

        Returns the ids int64 [n] of the tokens sampled from it, in the rows' order, on its device.
        """
        ...

    def take_shard(self, logits: torch.Tensor, shard: Shard) -> torch.Tensor:
        """This rank's columns of all rows, fp32 [R, V / ranks]; each row samples its likeliest.

        Called on every rank; returns the ids int64 [R], equal on all.
        """
        ...

    def take_shared(self, first: int, logits: torch.Tensor, shared: SharedRows) -> torch.Tensor:
        """This rank's columns, fp32 [n, V / ranks], of rows that the ranks sample for together.

        As `take_shard`; the first of them is the step's row `first`.
        """
        ...


class Follower:
    """The taking of a rank above 0: it helps to sample, and nobody reads its results."""

    def __init__(self, samples: int) -> None:
        """samples: tokens that the step samples."""
        self._samples = samples

    def take(self, first: int, logits: torch.Tensor) -> torch.Tensor:
        """Zeros for the whole step at once; rank 0's ids take their place."""
        count = self._samples if first == 0 else 0
        return torch.zeros(count, dtype=torch.int64, device=logits.device)

    def take_shard(self, logits: torch.Tensor, shard: Shard) -> torch.Tensor:
        """This rank's part of the sampling."""
        return sample_likeliest(logits, shard).tokens

    def take_shared(self, first: int, logits: torch.Tensor, shared: SharedRows) -> torch.Tensor:
        """This rank's share of the sampling."""
        return shared.sample(first, logits).tokens
