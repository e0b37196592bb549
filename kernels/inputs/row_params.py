"""Sampling parameters of one row as plain numbers; no torch."""

from collections.abc import Sequence
from typing import NamedTuple

_NO_BIAS: dict[int, float] = {}


class RowParams(NamedTuple):
    """One row's sampling parameters: the request's, and its place in the sequence.

    Temperature 0 is greedy; top_k <= 0, top_p 1 and min_p 0 are off. `seed` is in [0, 2^64),
    `position` is the sampled token's, `choice` the index among n. `prompt_ids` and `output_ids`
    feed the penalties (may be empty when those are off). `forbidden` ids cannot be sampled. With
    `allowed` (ceil(V / 8) bytes; bit i & 7 of byte i >> 3 is id i's) only ids in it can.
    """

    temperature: float
    seed: int
    position: int
    choice: int = 0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    bias: dict[int, float] = _NO_BIAS
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    forbidden: tuple[int, ...] = ()
    allowed: bytes | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether bias, a penalty or an impossible id touches the logits before temperature."""
        return bool(
            self.bias
            or self.forbidden
            or self.allowed is not None
            or self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )
