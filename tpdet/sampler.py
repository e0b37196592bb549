"""Logits to tokens and log-probabilities, row by row, by Rule 8.

Log-probabilities are those of the model's own distribution, before bias, penalties, temperature
and filters. A row's answer has the same bits alone or in any batch. NaN or +inf in a row's logits,
or nothing finite in it, fails that row alone. The arithmetic is in the kernels' `sampling.py` and
`log_softmax.py`; R rows, T prompt positions, V vocabulary ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpdet.kernels import ops
from tpdet.kernels.draw import Draw
from tpdet.request import Candidate
from tpdet.sampling_row import SampledToken, SamplingRow


@dataclass(frozen=True, slots=True)
class NumericalFailure:
    """A row that has no answer, and why."""

    reason: str


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow]
) -> list[SampledToken | NumericalFailure]:
    """One token a row: fp32 [R, V] and R rows -> R results, in order.

    Raises ValueError when logits are not fp32 [R, V].
    """
    _check(logits, len(rows))
    if not rows:
        return []
    logits, maximum, fit = _prepare(logits)
    tokens = torch.argmax(logits, dim=-1)  # the first of equal maxima
    draws = {}
    for index, row in enumerate(rows):
        how = _draw(row)
        if how.temperature != 0.0 or how.changes_logits:
            draws[index] = how
    if draws:
        chosen = ops.choose_tokens(logits, draws)
        tokens[list(chosen)] = torch.tensor(list(chosen.values())).to(tokens.device)
    counts = [row.params.logprobs or 0 for row in rows]
    return _results(logits, maximum, fit, tokens, counts)


def prompt_logprobs(
    logits: torch.Tensor, next_ids: Sequence[int], count: int
) -> list[SampledToken | NumericalFailure]:
    """Score given tokens: fp32 [T, V] and the T ids that followed -> T results.

    `count` candidates a position. Raises ValueError when logits are not fp32 [T, V].
    """
    _check(logits, len(next_ids))
    if not next_ids:
        return []
    logits, maximum, fit = _prepare(logits)
    tokens = torch.tensor(next_ids, dtype=torch.int64).to(logits.device)
    return _results(logits, maximum, fit, tokens, [count] * len(next_ids))


def _check(logits: torch.Tensor, rows: int) -> None:
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[0] != rows:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}; sampling {rows} rows takes "
            f"torch.float32 [{rows}, vocabulary]"
        )


def _prepare(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with one zero, each row's maximum, and which rows are fit to be sampled (bool [R]).

    The maximum is NaN or +inf if any logit is, and -inf if all are. Unfit rows read as zeros.
    """
    maximum = logits.amax(dim=-1)
    fit = torch.isfinite(maximum)
    # By select, so that nothing waits for the device to say whether a row is unfit.
    return torch.where(fit[:, None], logits + 0.0, 0.0), torch.where(fit, maximum, 0.0), fit


def _draw(row: SamplingRow) -> Draw:
    params = row.params
    needs_output = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    needs_prompt = params.repetition_penalty != 1.0
    return Draw(
        temperature=params.temperature,
        seed=row.seed,
        position=row.position,
        choice=row.choice,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        bias=params.logit_bias,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        prompt_ids=row.token_ids[: row.prompt_length] if needs_prompt else (),
        output_ids=row.token_ids[row.prompt_length :] if needs_prompt or needs_output else (),
        forbidden=row.forbidden_ids,
    )


def _results(
    logits: torch.Tensor,
    maximum: torch.Tensor,
    fit: torch.Tensor,
    tokens: torch.Tensor,
    counts: list[int],
) -> list[SampledToken | NumericalFailure]:
    """Results of chosen tokens, with the likeliest `counts[row]` beside each."""
    log_masses = ops.log_mass(logits, maximum)
    # NO_TOKEN is -1: any column will do, the row fails below.
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    logprobs = ops.log_probabilities(chosen, maximum, log_masses)
    tops = _tops(logits, maximum, log_masses, counts)
    results: list[SampledToken | NumericalFailure] = []
    # One copy from the device: token ids and fp32 are exact in fp64.
    answers = torch.stack([fit.double(), tokens.double(), logprobs.double()], -1).tolist()
    for row, (healthy, token, logprob) in enumerate(answers):
        if not healthy:
            results.append(NumericalFailure("NaN or infinity in the logits"))
        elif token < 0:
            results.append(NumericalFailure("bias and forbidden ids leave no token to choose"))
        else:
            results.append(SampledToken(int(token), logprob, tops.get(row, ())))
    return results


def _tops(
    logits: torch.Tensor, maximum: torch.Tensor, log_masses: torch.Tensor, counts: list[int]
) -> dict[int, tuple[Candidate, ...]]:
    """The `counts[row]` likeliest of each row that wants any, ties by lowest id."""
    rows = [row for row, count in enumerate(counts) if count > 0]
    if not rows:
        return {}
    at = torch.tensor(rows).to(logits.device)
    wanted = logits[at]
    ids = ops.top_ids(wanted, max(counts))
    values = wanted.gather(1, ids)
    logprobs = ops.log_probabilities(values, maximum[at, None], log_masses[at, None])
    pairs = torch.stack([ids.double(), logprobs.double()], -1).tolist()
    return {
        row: tuple(Candidate(int(token), logprob) for token, logprob in found[: counts[row]])
        for row, found in zip(rows, pairs, strict=True)
    }
