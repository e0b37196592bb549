"""Sampling parameters of one row as plain numbers; no torch.

A request's parameter that has the name of a field here reaches every row that is sampled. What
stands in `PlainParams` too, in the same order, also travels to all ranks, and by columns.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

TokenIds = Sequence[int] | np.ndarray
"""Ids, as an array int64 where many rows have parts of it."""

_NO_BIAS: dict[int, float] = {}


class PlainParams(NamedTuple):
    """How a row without bias, penalties and lists of ids is sampled, as in `RowParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, params: Any) -> "PlainParams":
        """The fields of these names of an object: of a `RowParams`, of a request's parameters."""
        return cls(*_PLAIN_FIELDS(params))

    @property
    def filtered(self) -> bool:
        """Whether top-k or top-p may take an id from the row."""
        return self.temperature != 0.0 and (self.top_k > 0 or self.top_p < 1.0)

    @property
    def changes_row(self) -> bool:
        """Whether the token may be sampled from other numbers than the logits after penalties."""
        random = self.temperature != 0.0
        return random and (self.temperature != 1.0 or self.filtered or self.min_p > 0.0)


_PLAIN_FIELDS = attrgetter(*PlainParams._fields)


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
    prompt_ids: TokenIds = ()
    output_ids: TokenIds = ()
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


_FIELDS = RowParams._fields
OF_REQUEST = _FIELDS[_FIELDS.index("choice") + 1 : _FIELDS.index("prompt_ids")]
"""The fields between a row's place and its lists of ids: with the temperature, the request's."""
