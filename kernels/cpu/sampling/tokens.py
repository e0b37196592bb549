"""One token from one row of logits, in the frozen order of the contract.

    x + 0.0  ->  bias  ->  repetition, frequency, presence penalties  ->  forbidden, allowed
      ->  temperature 0: argmax, ties to the lowest id
      ->  else: temperature  ->  top-k  ->  top-p  ->  min-p  ->  Gumbel-max

Each filter returns the ids that it keeps, ascending, with their values. A value, its mass and its
noise have the same bits alone or among others, so the ids that are filtered out change nothing. A
row is computed by itself: no result depends on the batch. Penalties and noise have files of
their own; temperature and the filters are here:

    temperature  x = x / fp32(T) + 0.0      true division; overflow held at the largest finite fp32
    top-k        the first k by sort key (value desc, id asc): exactly k, low ids on ties
    top-p        q_i = round(exp(x_i - max) * 2^40) of the kept ids, total = sum of q (int64)
                 P and threshold                                  `kernels/exact/thresholds.py`
                 the smallest prefix by sort key whose q sum to >= threshold
    min-p        x_i >= max + fp32(ln(min_p))                     fp32 addition; ln rounded once

What is left before the noise is the processed row; an id that is not left has -inf there.
Every filter keeps the largest. A threshold is a number of the whole vocabulary, found with integer
sums and maxima only, so a vocabulary split over shards finds the same one.
"""

import torch

from tpdet.kernels.cpu.sampling.noise import fixed_point_mass, gumbel_max
from tpdet.kernels.cpu.sampling.penalties import (
    add_bias,
    forbid,
    keep_allowed,
    penalise_frequency_and_presence,
    penalise_repetition,
)
from tpdet.kernels.cpu.sampling.ranks import select_prefix
from tpdet.kernels.cpu.threads import run_pieces
from tpdet.kernels.exact.thresholds import (
    KEEP_ALL,
    min_p_distance,
    scale_by_temperature,
    top_p_numerator,
    top_p_threshold,
)
from tpdet.kernels.inputs.row_params import RowParams

NO_TOKEN = -1

_COSTLY = 1 << 16  # logits; below that, threads cost more than they save


def choose_tokens(
    logits: torch.Tensor, params: dict[int, RowParams], processed: torch.Tensor | None = None
) -> dict[int, int]:
    """Tokens of some rows: fp32 [R, V] and params by row -> tokens by row, side by side.

    processed: fp32 [R, V], where these rows are written as they are before the noise.
    """
    rows = list(params)
    tokens = dict.fromkeys(rows, NO_TOKEN)

    def choose(piece: int) -> None:
        row = rows[piece]
        into = None if processed is None else processed[row]
        tokens[row] = choose_token(logits[row], params[row], into)

    run_pieces(len(rows), choose, costly=len(rows) * logits.shape[1] >= _COSTLY)
    return tokens


def choose_token(
    logits: torch.Tensor, how: RowParams, processed: torch.Tensor | None = None
) -> int:
    """The token of one row: fp32 [V] with a finite maximum -> vocabulary id.

    NO_TOKEN (-1) when bias, forbidden and allowed ids allow no id. `logits` are not changed.
    processed: fp32 [V], where the row is written as it is before the noise.
    """
    logits = logits + 0.0
    if how.changes_logits:
        _penalise(logits, how)
    if processed is not None:
        processed.copy_(logits)
    if how.changes_logits and logits.amax() == -torch.inf:
        return NO_TOKEN
    if how.temperature == 0.0:
        return int(torch.argmax(logits))
    values = scale_by_temperature(logits, how.temperature)
    ids = torch.arange(values.numel())
    if 0 < how.top_k < values.numel():
        values, ids = _keep(keep_top_k(values, how.top_k), values, ids)
    numerator = top_p_numerator(how.top_p)
    if numerator < KEEP_ALL:
        values, ids = _keep(keep_top_p(values, numerator), values, ids)
    if how.min_p > 0.0:
        values, ids = _keep(keep_min_p(values, how.min_p), values, ids)
    if processed is not None:
        processed.fill_(-torch.inf)[ids] = values
    return gumbel_max(values, ids, seed=how.seed, position=how.position, choice=how.choice)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Mask of the k largest: fp32 [N] -> bool [N] with exactly min(k, N) set."""
    return select_prefix(logits, None, k)


def keep_top_p(logits: torch.Tensor, numerator: int) -> torch.Tensor:
    """Mask of the smallest prefix that holds the share: fp32 [N] (max finite) -> bool [N]."""
    mass = fixed_point_mass(logits, logits.amax())
    return select_prefix(logits, mass, top_p_threshold(numerator, int(mass.sum())))


def keep_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Mask of ids at least `min_p` (> 0) times as likely as the likeliest: fp32 [N] -> bool [N]."""
    return logits >= logits.amax() + torch.tensor(min_p_distance(min_p), dtype=torch.float32)


def _penalise(logits: torch.Tensor, how: RowParams) -> None:
    """Bias, penalties and forbidden ids, in place and in this order."""
    if how.bias:
        add_bias(logits, how.bias)
    output = torch.tensor(how.output_ids, dtype=torch.int64)
    if how.repetition_penalty != 1.0:
        prompt = torch.tensor(how.prompt_ids, dtype=torch.int64)
        penalise_repetition(logits, torch.cat([prompt, output]), how.repetition_penalty)
    if how.frequency_penalty != 0.0 or how.presence_penalty != 0.0:
        penalise_frequency_and_presence(logits, output, how.frequency_penalty, how.presence_penalty)
    if how.forbidden:
        forbid(logits, how.forbidden)
    if how.allowed is not None:
        keep_allowed(logits, how.allowed)


def _keep(
    mask: torch.Tensor, values: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return values[mask], ids[mask]
