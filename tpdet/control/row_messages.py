"""Messages between scheduler and sampler: a row's key, a row to score, a token.

These sit below both, so that neither imports the other. A row to sample is a `RowParams`.
"""

from dataclasses import dataclass

import msgspec

from tpdet.requests.request import Candidate

RowKey = tuple[int, int]  # (admission number, choice): the total order of rows


Beside = int | tuple[int, ...] | None
"""What is shown beside a token: so many of the likeliest ids, or these ids; None: nor its rank."""


@dataclass(frozen=True, slots=True)
class ScoringRow:
    """The prompt tokens that a row's logits score.

    The first `len(target_ids)` of the row's logits belong to positions `start`, `start + 1`, ...
    and `target_ids[j]` is the prompt token that follows position `start + j`, with `beside`
    beside it.
    """

    key: RowKey
    request_id: str
    start: int
    target_ids: tuple[int, ...]
    beside: Beside


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled or scored token, its fp32 log-probability, and the likeliest tokens, best first.

    `rank`: 1 for the likeliest id; of equal logits the lowest id comes first. 0 where the request
    asks for no log-probabilities.
    """

    token_id: int
    logprob: float
    top: tuple[Candidate, ...] = ()
    rank: int = 0
