"""The rows of a plan, made from a sequence: what is computed, sampled and scored."""

from collections.abc import Mapping

from tpdet.control.plan import Row
from tpdet.control.sampling_row import RowKey, SamplingRow, ScoringRow
from tpdet.scheduler.sequence import PENDING, Sequence, pages_for


def plan_row(sequence: Sequence, count: int, sample_index: Mapping[RowKey, int]) -> Row:
    """The row that computes the next `count` tokens of `sequence`.

    sample_index: the place of each sequence's token among those that the step before samples. The
    row names a pending token by it: -1 for the first one, -2 for the second.
    """
    start, end = sequence.computed, sequence.computed + count
    held = pages_for(end)
    token_ids = tuple(sequence.tokens[start:end])
    if token_ids[-1] == PENDING:
        token_ids = (*token_ids[:-1], -1 - sample_index[sequence.key])
    samples = _samples_at(sequence, end)
    wants_scores = sequence.scores_prompt
    return Row(
        sequence.key[0],
        sequence.choice,
        sequence.version_id,
        start,
        token_ids,
        sequence.pages[:held],
        sequence.versions[:held],
        end - _first_logits(sequence, start, end) if wants_scores else int(samples),
        samples,
    )


def sampling_row(sequence: Sequence, end: int) -> SamplingRow:
    """What the sampler needs after a row that ends before position `end` and samples a token."""
    params = sequence.request.params
    return SamplingRow(
        key=sequence.key,
        request_id=sequence.request.request_id,
        params=params,
        seed=sequence.seed,
        choice=sequence.choice,
        prompt_length=sequence.prompt_length,
        token_ids=tuple(sequence.tokens[:end]) if sequence.penalises else (),
        position=end,
        forbidden_ids=sequence.forbidden_ids(end),
        allowed=None if sequence.constraint is None else sequence.allowed_ids(end),
    )


def scoring_row(sequence: Sequence, start: int, end: int) -> ScoringRow | None:
    """Which prompt tokens the row of positions [start, end) scores; None if none."""
    if not sequence.scores_prompt:
        return None
    first = _first_logits(sequence, start, end)
    last = min(end, sequence.prompt_length - 1)
    top = sequence.request.params.prompt_logprobs
    if top is None or first >= last:
        return None
    targets = sequence.request.prompt_token_ids[first + 1 : last + 1]
    return ScoringRow(sequence.key, sequence.request.request_id, first, targets, top)


def _samples_at(sequence: Sequence, end: int) -> bool:
    """Whether a row that ends before position `end` samples a token."""
    return end == len(sequence.tokens) and sequence.request.max_tokens > 0


def _first_logits(sequence: Sequence, start: int, end: int) -> int:
    """The first position of the row [start, end) whose logits are wanted; `end` if none is.

    Prompt scores come from a prefix of the prompt and a sample from the last position, so the
    wanted logits are always a suffix of the row.
    """
    first = end - 1 if _samples_at(sequence, end) else end
    if sequence.scores_prompt and len(sequence.prompt_scores) < sequence.prompt_length - 1:
        first = min(first, max(start, len(sequence.prompt_scores)))
    return first
