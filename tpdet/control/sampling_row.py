"""Messages between the scheduler and the sampler: a row to sample, a row to score, a token.

These sit below both, so that neither imports the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tpdet.request import Candidate, SamplingParams

RowKey = tuple[int, int]  # (admission number, choice): the total order of rows


class SamplingRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that the token after a row's last one may depend on, besides the logits.

    `position` is where the new token goes. `token_ids` are the prompt and everything generated so
    far, split at `prompt_length` (the original one, also after a preemption). All `position` are
    given where a penalty reads them, and none otherwise. `forbidden_ids`, ascending, would end
    the sequence before `min_tokens`. `allowed` are the ids that its schema lets follow
    (`tpdet.grammar.constraint.Next`), None without a schema.
    """

    key: RowKey
    request_id: str
    params: SamplingParams
    seed: int
    choice: int
    prompt_length: int
    token_ids: Sequence[int]
    position: int
    forbidden_ids: tuple[int, ...]
    allowed: bytes | None = None


@dataclass(frozen=True, slots=True)
class ScoringRow:
    """The prompt tokens that a row's logits score.

    The first `len(target_ids)` of the row's logits belong to positions `start`, `start + 1`, ...
    and `target_ids[j]` is the prompt token that follows position `start + j`. `top` likeliest
    tokens are wanted beside each.
    """

    key: RowKey
    request_id: str
    start: int
    target_ids: tuple[int, ...]
    top: int


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled or scored token, its fp32 log-probability, and the likeliest tokens, best first.

    `rank`: 1 for the likeliest id; of equal logits the lowest id comes first. 0 where the request
    asks for no log-probabilities.
    """

    token_id: int
    logprob: float
    top: tuple[Candidate, ...] = ()
    rank: int = 0
