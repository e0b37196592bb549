"""Tokens and log-probabilities of a step's rows on the CPU, from whole rows.

By numbers that are moved on from step to step, as a GPU's graphs do (`sample_written`):

    numbers  int64 [R, WORDS]  a row of `PlainRows.numbers`, its position, then nothing
"""

from collections.abc import Sequence

import numpy as np
import torch

from tpdet.kernels.cpu.sampling.noise import log_mass
from tpdet.kernels.cpu.sampling.ranks import top_ids
from tpdet.kernels.cpu.sampling.tokens import choose_tokens
from tpdet.kernels.inputs.plain_rows import FIELDS, WORDS, PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.sampled_rows import PackedRows, RowAnswers, SampledRows, packed_samples
from tpdet.kernels.inputs.vocabulary_shard import Shard


def sample_rows(logits: torch.Tensor, params: Sequence[RowParams], shard: Shard) -> SampledRows:
    """One token a row: fp32 [R, W] and R params."""
    return packed_samples(sample_answers(logits, params, shard), pack_answers)


def sample_answers(logits: torch.Tensor, params: Sequence[RowParams], shard: Shard) -> RowAnswers:
    """`sample_rows` before the last subtraction."""
    logits, maximum, fit = _prepare(shard.whole(logits))
    return _answers(logits, maximum, fit, _choose(logits, params))


def sample_processed(
    logits: torch.Tensor, params: Sequence[RowParams], shard: Shard
) -> tuple[RowAnswers, torch.Tensor]:
    """`sample_answers` with log-probabilities of the rows as they are before the noise.

    Also these rows, fp32 [R, W], in which an id that a filter or a mask removed has -inf.
    """
    rows, _, fit = _prepare(shard.whole(logits))
    processed = rows.clone()
    tokens = _choose(rows, params, processed)
    processed, maximum, _ = _prepare(processed)  # a row without ids has no answer: zeros will do
    answers = _answers(processed, maximum, fit, tokens)
    own, width = torch.zeros_like(logits), shard.width(logits.shape[1])
    own[:, :width] = processed[:, shard.first_id : shard.first_id + width]
    return answers, own


def score_tokens(logits: torch.Tensor, tokens: Sequence[int], shard: Shard) -> SampledRows:
    """Log-probabilities of tokens: fp32 [T, W] and T ids."""
    scored = torch.tensor(tokens, dtype=torch.int64)
    return packed_samples(_answers(*_prepare(shard.whole(logits)), scored), pack_answers)


def pack_answers(
    answers: torch.Tensor, share: int, places: torch.Tensor | None = None
) -> PackedRows:
    """Rows of `RowAnswers.answers`: fp64 [ranks, >= 4 * share], each rank's at its beginning.

    places int64 [R]: where the rows stand among all ranks' shares; None: one rank's, in order.
    """
    rows = answers[:, : 4 * share].view(len(answers), 4, share).transpose(1, 2).reshape(-1, 4)
    if places is not None:
        rows = rows[places]
    logprobs = (rows[:, 2] - rows[:, 3]).to(torch.float32)
    packed = torch.stack([rows[:, 0], rows[:, 1], logprobs.double()], -1)
    return PackedRows(rows[:, 1].to(torch.int64), logprobs, rows[:, 0] != 0.0, packed)


def top_of_rows(
    logits: torch.Tensor, rows: Sequence[int], count: int, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest of some rows, best first: ids int64 and logits fp32 [len(rows), count]."""
    chosen, _, _ = _prepare(shard.whole(logits[list(rows)]))
    ids = top_ids(chosen, count)
    return ids, chosen.gather(1, ids)


def write_rows(rows: PlainRows, vocabulary: int, numbers: np.ndarray) -> bool:
    """Write rows to int64 [R * WORDS], R >= len(rows) > 0; the others are pads: zeros, greedy.

    Returns whether any row has top-k or top-p.
    """
    numbers[:] = 0
    table = numbers.reshape(-1, WORDS)[: len(rows)]
    table[:, :FIELDS], table[:, FIELDS] = rows.numbers, rows.positions
    return any(way.filtered for way in rows.ways()[0])


def sample_written(
    logits: torch.Tensor, numbers: torch.Tensor, filtered: bool, shard: Shard
) -> SampledRows:
    """One token a row: fp32 [R, W] and what `write_rows` wrote."""
    table = numbers.numpy().reshape(-1, WORDS)
    return sample_rows(logits, PlainRows(table[:, :FIELDS].tobytes(), table[:, FIELDS]), shard)


def move_on(numbers: torch.Tensor, by: torch.Tensor) -> None:
    """Add int64 [R] to the positions of written rows."""
    numbers.view(-1, WORDS)[:, FIELDS].add_(by)


def _choose(
    logits: torch.Tensor, params: Sequence[RowParams], processed: torch.Tensor | None = None
) -> torch.Tensor:
    """A token int64 for each whole row that `_prepare` made fit; processed: of `choose_tokens`."""
    tokens = torch.argmax(logits, dim=-1)  # the first of equal maxima
    others = {
        row: how for row, how in enumerate(params) if how.temperature != 0.0 or how.changes_logits
    }
    if others:
        chosen = choose_tokens(logits, others, processed)
        tokens[list(chosen)] = torch.tensor(list(chosen.values()))
    return tokens


def _prepare(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with one zero, each row's maximum, and which rows are fit to be sampled (bool [R]).

    The maximum is NaN or +inf if any logit is, and -inf if all are. Unfit rows read as zeros.
    """
    maximum = logits.amax(dim=-1)
    fit = torch.isfinite(maximum)
    return torch.where(fit[:, None], logits + 0.0, 0.0), torch.where(fit, maximum, 0.0), fit


def _answers(
    logits: torch.Tensor, maximum: torch.Tensor, fit: torch.Tensor, tokens: torch.Tensor
) -> RowAnswers:
    log_masses = log_mass(logits, maximum)
    # -1 (no id is allowed): any column will do, the row fails.
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    distances = chosen.double() - maximum.double()
    answers = torch.stack([fit.double(), tokens.double(), distances, log_masses])
    return RowAnswers(answers, maximum)
