"""Which part of the vocabulary a rank's logits hold, and how ranks gather all parts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Gather = Callable[[torch.Tensor], torch.Tensor]
"""All-gather of bytes: contiguous [..] -> [ranks, ..], the same on every rank, in rank order."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Columns of logits [R, W] are the ids `first_id`, `first_id + 1`, ... below `vocab_size`.

    Every rank has the same W, rank r starts at r * W, and columns past the vocabulary are padding.
    `gather` None: the logits are whole rows.
    """

    first_id: int
    vocab_size: int
    gather: Gather | None = None

    def width(self, columns: int) -> int:
        """How many of a rank's columns are ids of the vocabulary; may be 0."""
        return max(0, min(columns, self.vocab_size - self.first_id))

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Whole rows [R, V] from everyone's [R, W]; bytes are copied."""
        if self.gather is None:
            return x
        everyone = self.gather(x.contiguous())
        return everyone.permute(1, 0, 2).reshape(len(x), -1)[:, : self.vocab_size].contiguous()
