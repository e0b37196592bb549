"""The answers of a step's sampling, on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Answers of R rows; where `fit` is False, the other fields mean nothing (the token is 0).

    `tokens` int64 [R] (-1: no id is allowed), `logprobs` fp32 [R], `fit` bool [R] (maximum
    finite), `maximum` fp32 [R], `log_masses` fp64 [R], `packed` fp64 [R, 3]: fit, token, logprob.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    fit: torch.Tensor
    maximum: torch.Tensor
    log_masses: torch.Tensor
    packed: torch.Tensor


class RowAnswers(NamedTuple):
    """Answers of R rows, one step before `SampledRows`: ranks may exchange them.

    `answers` fp64 [4, R]: fit, token, the chosen logit's distance from the maximum, log mass.
    `maximum` as of SampledRows.
    """

    answers: torch.Tensor
    maximum: torch.Tensor

    @property
    def log_masses(self) -> torch.Tensor:
        """fp64 [R]."""
        return self.answers[3]


class PackedRows(NamedTuple):
    """Answers of R rows as they go to the host, and beside them; fields as of SampledRows."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    fit: torch.Tensor
    packed: torch.Tensor


def packed_samples(
    rows: RowAnswers, pack: Callable[[torch.Tensor, int], PackedRows]
) -> SampledRows:
    """The last step for rows of one rank, in order; `pack`: the device's `pack_answers`."""
    tokens, logprobs, fit, packed = pack(rows.answers.view(1, -1), len(rows.maximum))
    return SampledRows(tokens, logprobs, fit, rows.maximum, rows.log_masses, packed)
